"""ProtoFed-SP's settings as rules: how clients learn, how the server aggregates, what is left out, what is refused."""

from dataclasses import replace
from itertools import compress

from protofed.client.model import VARIANTS, LocalRule
from protofed.config import RunConfig, ablations_of
from protofed.errors import ConfigError
from protofed.federation.plan import Plan, Stream
from protofed.methods.scoring import refuse_prior
from protofed.privacy.upload import RoundRule, UploadRule

PRINTED_STEPS = 3  # 3 epochs of batches larger than a client's slice
PRINTED_PROTOTYPES = 128


def local_rule(config: RunConfig) -> LocalRule:
    """How clients learn in this mode, less what is ablated."""
    settings, out, allowed = config.protofed, ablations_of(config.protofed), may_use(config)
    used = () if "personal" in out else compress(VARIANTS, allowed)
    rule = LocalRule(
        loss=config.training.loss,
        top_m=settings.top_m,
        temperature=settings.temperature,
        eta_l=settings.long_rate,
        eta_s=settings.short_rate,
        eta_r=settings.row_rate,
        lambda_p=settings.sparsity,
        lambda_max=settings.lambda_max,
        gamma=settings.gamma,
        tau_a=settings.alignment_temperature,
        alignment=settings.alignment,
        inner_prox_steps=settings.inner_prox_steps,
        by_row=settings.group_sparsity,
        max_grad_norm=config.training.max_grad_norm,
        use_long=not out & {"long", "personal"},
        use_short=not out & {"short", "personal"},
        use_prototypes="prototypes" not in out,
        use_rows=not _without_rows(config),
        align="alignment" not in out,
        bf16=settings.bf16,
        steps=settings.local_steps if any(any(variant) for variant in used) else 0,
        negatives=config.training.negatives,
        stride=config.training.stride,
        prompt_history=settings.prompt_history,
        carry=settings.carry,
        session_gap_hours=settings.session_gap_hours,
        row_order=config.stream.row_order_history,
        allowed=allowed,
    )
    if settings.mode != "literal":
        return rule
    return replace(rule, as_printed=True, eta_l=1e-3, eta_s=5e-3, lambda_p=1e-4)  # the paper's appendix


def _without_rows(config: RunConfig) -> bool:
    return config.protofed.mode == "literal" or bool(ablations_of(config.protofed) & {"own-rows", "personal"})


def round_rule(config: RunConfig, n_prototypes: int, noise_multiplier: float, n_clients: int) -> RoundRule:
    """How uploads are made and aggregated in this mode; an aggregator that cannot be noised is refused."""
    privacy, settings = config.privacy, config.protofed
    upload = UploadRule(n_prototypes, settings.embedding, privacy.clip_radius, privacy.count_weight)
    return RoundRule(
        upload,
        noise_multiplier,
        privacy.trust if settings.mode == "reference" else "central",
        settings.aggregator,
        settings.momentum,
        settings.margin,
        least=max(2, int(privacy.sampling_rate * n_clients / 2)),
        as_printed=settings.mode == "literal",
    )


def may_use(config: RunConfig) -> tuple[bool, ...]:
    """Which of the variants (prompt, own rows) a client may choose from."""
    out = ablations_of(config.protofed)
    prompt, rows = "prompts" not in out, not _without_rows(config)
    fixed = "acceptance" in out or "personal" in out or config.protofed.mode == "literal"
    if fixed:
        return tuple(variant == (prompt, rows) for variant in VARIANTS)
    return tuple((prompt or not with_prompt) and (rows or not with_rows) for with_prompt, with_rows in VARIANTS)


def check_claim(config: RunConfig) -> None:
    """Refuse settings that would share raw events next to noised prototypes."""
    if config.protofed.mode == "reference":
        refuse_prior(config, "use --mode nodp, or leave the prior out")


def as_run(config: RunConfig) -> RunConfig:
    """The config as ProtoFed-SP runs it: literal with the paper's own numbers where nothing else was asked for.

    What --share says is the private mode: with all its releases, or with none.
    """
    settings = config.protofed
    if settings.mode == "private":
        return replace(config, protofed=replace(settings, mode="reference"))
    if settings.mode == "nothing":
        config = without_uploads(config)
        settings = replace(config.protofed, mode="reference", newcomers="mean-row")
        return replace(config, protofed=settings, privacy=replace(config.privacy, trust="central"))
    if settings.mode != "literal":
        return config
    k = settings.prototypes or PRINTED_PROTOTYPES
    return replace(
        config, protofed=replace(settings, prototypes=k, local_steps=min(settings.local_steps, PRINTED_STEPS))
    )


def streams_asked(config: RunConfig) -> Plan:
    """What the private mode releases: prototypes, round by round, and new items' rows, once a slice by everybody."""
    privacy, n_slices = config.privacy, config.stream.n_slices
    rounds, noise = n_slices * privacy.rounds_per_slice, privacy.noise_multiplier
    rows = privacy.newcomer_noise or (0.0 if privacy.target_epsilon else 2 * noise)
    return (
        Stream("prototypes", privacy.sampling_rate, rounds if uploads_happen(config) else 0, noise),
        Stream("new items", 1.0, n_slices if rounds else 0, rows, privacy.newcomer_share),
    )


def without_uploads(config: RunConfig) -> RunConfig:
    """The config under which prototypes stay as they are, and so nothing of prompts is uploaded."""
    without = ",".join(sorted(ablations_of(config.protofed) | {"static-prototypes"}))
    return replace(config, protofed=replace(config.protofed, ablate=without))


def uploads_happen(config: RunConfig) -> bool:
    """Whether there is anything to upload and anybody who takes it."""
    return not ablations_of(config.protofed) & {"long", "static-prototypes", "personal", "prompts"}


def may_introduce(config: RunConfig) -> bool:
    """Whether new items may get rows from noised sums: the server has to add the noise."""
    settings, trust = config.protofed, config.privacy.trust
    possible = (settings.mode, trust) == ("reference", "central")
    if settings.newcomers == "noised" and not possible:
        raise ConfigError(
            f"protofed.newcomers = noised needs --mode reference and --trust central, got {settings.mode} and {trust}"
        )
    return possible and settings.newcomers != "mean-row"
