"""A dummy entry for each row of docs/adding.md, in the place that the row names, and the words that choose it in a run."""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Edit(NamedTuple):
    """A change of one file."""

    file: str
    before: str  # stands once in the file
    after: str


class Entry(NamedTuple):
    """What is written to add a thing, and the words of a command that choose it."""

    edits: tuple[Edit, ...] = ()
    words: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()  # new ones: names and texts


def entry(file: str, before: str, after: str, *words: str) -> Entry:
    return Entry((Edit(file, before, after),), words)


# Those that one run uses.
OF_THE_RUN = {
    "a data source": entry(
        "tunix/data/sources.py",
        "SOURCES = (",
        """\
class Numbers(Synthetic):
    source: Literal["numbers"]

    def read(self, unit):
        for number in range(unit.start, unit.stop):
            yield Item(f"numbers@{number}", " ".join(map(str, range(number, number + 100))))


SOURCES = (Numbers, """,
        "data=synthetic", "data.source=numbers", "data.num_documents=200", "data.mean_document_bytes=300",
    ),
    "an optimizer": entry(
        "tunix/optimizers/table.py",
        "OPTIMIZERS = (",
        """\
class Signs(Lion):
    name: Literal["signs"]

    def rule(self, weights):
        import jax
        import optax

        return optax.stateless(lambda updates, params: jax.tree.map(lambda update: update**0, updates))


OPTIMIZERS = (Signs, """,
        "optimizer=lion", "optimizer.name=signs", "optimizer.weight_decay=0",
    ),
    "a schedule": entry(
        "tunix/optimizers/schedules.py",
        "SHAPES = {",
        'SHAPES = {\n    "halving": Shape(lambda phases: lambda step: 0.5**step),',
        "scheduler.name=halving", "scheduler.warmup_steps=0", "optimizer.learning_rate=0.5",
    ),
    "a loss": entry(
        "tunix/training/loss.py",
        "def find_loss_kind(",
        """\
def _make_twice(cfg):
    once = LOSSES["next_token"].make(cfg)

    def twice(model, batch, seed):
        loss = once(model, batch, seed)
        return loss._replace(sums=loss.sums | {"twice": 2 * loss.sums["loss"], "evens": jnp.sum(batch["is_even"])})

    return twice


LOSSES["twice"] = LOSSES["next_token"]._replace(make=_make_twice)


def find_loss_kind(""",
    ),
    "a field of a batch": entry(
        "tunix/training/loss.py",
        "_replace(make=_make_twice)",
        """_replace(
    make=_make_twice,
    fields=FIELDS | {"is_even": Field("ABT", "float32", lambda batch: batch["tokens"] % 2 == 0)},
)""",
    ),
    "a kind of task": entry(
        "tunix/config/task.py",
        "AnyTask = Annotated[",
        """\
class Counting(Pretrain):
    name: Literal["counting"]
    documents = "numbers"
    default_loss = "twice"


AnyTask = Annotated[Counting | """,
        "task.name=counting",
    ),
    "a kind of documents": entry(
        "tunix/data/documents.py",
        "DOCUMENTS = {",
        """\
DOCUMENTS = {
    "numbers": DocumentKind(read_text, encode_texts, "numbers"),""",
    ),
    "a metric sink": entry(
        "tunix/run/table.py",
        "SINKS: dict[str, Callable[[Start], Sink]] = {",
        """\
class Lines(Jsonl):
    def __init__(self, start):
        self.file = (start.folder / "lines.jsonl").open("w")


SINKS: dict[str, Callable[[Start], Sink]] = {"lines": Lines, """,
        "logging.sinks=[jsonl,lines]",
    ),
    "a copy of the parameters": entry(
        "tunix/training/ema.py",
        '= {"ema":',
        '= {"first": lambda training: {"first": Copy(lambda copy, params: copy)}, "ema":',
    ),
    "a reason to end a run": entry(
        "tunix/run/early_stopping.py",
        "REASONS: list[Reason] = [",
        """\
def enough(now):
    return Finished("three steps are enough") if now.step == 3 else None


REASONS: list[Reason] = [enough, """,
        "training.max_steps=9",
    ),
    "a place for checkpoints": entry(
        "tunix/checkpoints/store.py",
        "STORAGE = {",
        """\
class MarkedFolder(Folder):
    def commit(self, step, written, metrics):
        super().commit(step, written, metrics)
        (self.folder.parent / "marked").touch()


STORAGE = {
    "marked": StorageKind(lambda folder, is_shared: True, lambda folder, cfg: MarkedFolder(Path(folder))),""",
    ),
    "a mesh axis that splits the batch": entry(
        "tunix/sharding/table.py",
        'Axis("dp", s',
        'Axis("extra", splits_batch=True),\n    Axis("dp", s',
        "model.mesh_shape=[[2,2,2],[extra,wide,cp]]", "training.micro_batch_size=4",
    ),
    "a layer": Entry(
        (Edit(
            "tunix/sharding/table.py",
            '        Dim("V", "vocabulary",',
            """\
        Dim("ω", "narrow width", ("tp", "wide"), ("tp", "wide"), key="model.mlp.narrow_dim"),
        Dim("V", "vocabulary",""",
        ),),
    ),
    "a mesh axis that splits a dimension": entry("tunix/sharding/table.py", 'Axis("cp", k', 'Axis("wide"),\n    Axis("cp", k'),
    "an exchange of attention": entry(
        "tunix/models/table.py",
        "CP_EXCHANGES = {",
        'CP_EXCHANGES = {\n    "another": AttentionExchange(\n        "tunix.models.context_parallel:swap_tokens_for_heads",\n'
        '        "tunix.costs.communication:swap_heads",\n        "tunix.plan.derived_time:time_of_ulysses",\n    ),',
        "model.cp_exchange=another",
    ),
    "an attention kernel": entry(
        "tunix/models/table.py",
        "KERNELS = {",
        'KERNELS = {\n    "another": "tunix.models.attention:plain",',
        "model.attention=another", "training.check_attention=false",
    ),
    "a way in which tokens act on one another": entry(
        "tunix/models/block.py",
        "MIXERS = {",
        """\
class Shifted(Attention):
    def __init__(self, cfg, layout, draws):
        from tunix.models.layers import Bias

        super().__init__(cfg, layout, draws)
        self.shift = Bias("BtD", cfg, layout)

    def __call__(self, x, *others):
        out, kept = super().__call__(x, *others)
        return self.shift(out), kept


MIXERS = {
    "shifted": PartKind(lambda cfg, layer: cfg.stack_of(layer) == "last_blocks", Shifted),""",
    ),
    "a model with another kind of block": entry(
        "tunix/config/model.py",
        '        return f"{shared}blocks"',
        """\
        if self.family == "mine" and layer == self.num_layers - 1:
            return "last_blocks"
        return f"{shared}blocks\"""",
    ),
    "an MLP": Entry(
        (
            Edit(
                "tunix/config/layers.py",
                "AnyMlp = Annotated[",
                """\
class NarrowMlp(Section):
    kind: Literal["narrow"]
    activation: Activation
    narrow_dim: Count


AnyMlp = Annotated[NarrowMlp | """,
            ),
            Edit(
                "tunix/models/block.py",
                "MLPS = {",
                """\
class Narrow(nnx.Module):
    def __init__(self, cfg, layout, initializer):
        from tunix.models.layers import Einsum

        self.layout = layout
        self.up = Einsum("mlp.up", "BTD,Dω->BTω", cfg, layout, initializer)
        self.down = Einsum("mlp.down", "BTω,ωD->BtD", cfg, layout, initializer)

    def __call__(self, x, dropout_key):
        from tunix.models.layers import NO_SUMS

        return self.down(jax.nn.silu(self.up(self.layout.gather_tokens(x), dropout_key)), dropout_key), NO_SUMS


MLPS = {
    "narrow": PartKind(lambda cfg, layer: cfg.mlp.kind == "narrow", Narrow),""",
            ),
        ),
    ),
    "a family of models whose parts exist": Entry(
        (Edit("tunix/huggingface/table.py", "] = {", '] = {\n    "mine": like_llama("mine", "MineForCausalLM"),'),),
        files=(
            ("conf/model/family/mine.yaml", "defaults: [llama@_here_]\nfamily: mine\nmlp: {kind: narrow, narrow_dim: 24}\n"),
        ),
    ),
    "a model size": Entry(
        files=(("conf/model/mine_tiny.yaml", "defaults: [tiny@_here_, family/mine@_here_]\n"),),
        words=("model=mine_tiny", "model.global_every=1", "model.sliding_window=null"),
    ),
    "a rematerialization policy": entry(
        "tunix/config/training.py", "REMAT = {", 'REMAT = {\n    "norms": ("norm",),', "training.remat=norms"
    ),
}  # fmt: skip
# Those of which programs are traced (support/use_new_entries.py).
OF_PROGRAMS = {
    "a dtype of products": entry(
        "tunix/models/table.py",
        "MATMUL_DTYPES = {",
        'MATMUL_DTYPES = {\n    "tiny_floats": MatmulDtype("tunix.models.matmul:fp8_product", "tiny floats", "fp8_tflops"),\n    ',
        "training.matmul_dtype=tiny_floats",
    ),
    "a kind of matrix product": entry(
        "tunix/models/matmul.py",
        "MATMUL = {",
        """\
def _halves(equation, x, w, spec):
    return (_plain(equation, x, w / 2, spec) * 2).astype(x.dtype)


MATMUL = {
    "halves": ProductKind(_halves, few_rows_on=("cpu",)),""",
    ),
    "an objective of pairs": entry(
        "tunix/config/task.py",
        "PAIR_OBJECTIVES = {",
        'PAIR_OBJECTIVES = {\n    "far_apart": PairObjective("math:inf", has_reference=True, per_token=False, is_smoothed=True),',
    ),
    "an exchange of experts": entry(
        "tunix/models/table.py",
        "EXPERT_EXCHANGES = {",
        'EXPERT_EXCHANGES = {\n    "all": ExpertExchange(\n        "tunix.models.expert_parallel:exchange_by_gather",\n'
        '        "tunix.costs.communication:gather_tokens",\n    ),',
        "model.expert_exchange=all",
    ),
    "a product of experts": entry(
        "tunix/models/table.py",
        "GROUPED = {",
        'GROUPED = {\n    "another": "jax.lax:ragged_dot",',
        "model.expert_products=another",
    ),
    "a mesh axis that keeps weights": entry(
        "tunix/sharding/table.py",
        'Axis("cp", k',
        'Axis("keeper", keeps_weights=True),\n    Axis("cp", k',
        "model.mesh_shape=[[2,2,2],[pp,ep,keeper]]",
    ),
    "a reward": entry(
        "tunix/rl/table.py",
        "REWARDS: dict[str, Reward] = {",
        """\
def polite(prompts, completions, **columns):
    return [float("please" in completion) for completion in completions]


REWARDS: dict[str, Reward] = {
    "polite": polite,""",
    ),
    "an environment": entry(
        "tunix/rl/table.py",
        "ENVIRONMENTS: dict[str, type] = {",
        """\
class Echo:
    def reset(self):
        pass

    def echo(self, text: str) -> str:
        "Say it again."
        return text


ENVIRONMENTS: dict[str, type] = {
    "echo": Echo,""",
    ),
    "a format of tool calls": entry(
        "tunix/rl/tool_parsers.py",
        "TOOL_CALLS = {",
        """\
TOOL_CALLS = {
    "arrow": CallFormat(
        lambda text: [Call(*json.loads(call)) for call in re.findall("->(.*)", text)],
        '->["NAME", {"ARGUMENT": VALUE}]',
        marks=("-> ",),
        begins="->",
        make_id=lambda call, number: f"call {number}",
    ),""",
    ),
    "a kind of device": Entry(
        files=(
            (
                "conf/command/device/mine.yaml",
                (ROOT / "conf/command/device/l40s.yaml")
                .read_text()
                .replace("name: L40S", "name: Mine")
                .replace("network: ethernet_100", "network: mine"),
            ),
        )
    ),
    "a kind of network": Entry(
        files=(
            (
                "conf/command/network/mine.yaml",
                "nic_gb_per_s: 99\nshare: 0.5\nhop_us: 1\nnics_per_node: null\nsource: made up\n",
            ),
        )
    ),
}  # fmt: skip
