"""Any method under user-level differential privacy: its trainings become private steps, its other looks are ruled out.

A wrapped method learns slices >= 1 only through `PrivateDescent`. What else it keeps must follow from released weights
or from the base block, which the claim does not cover; WRAPPED lists the methods for which that holds, with the number
of trainings that a slice takes, and REFUSED those for which it does not, with the reason. Anything else is refused too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from protofed.backbone.training import Descend
from protofed.config import PrivacyConfig, RunConfig
from protofed.errors import ConfigError, check_installed
from protofed.federation.plan import Plan, Stream, check_paid, ledger, plan_releases
from protofed.methods.baselines.adapters import AdapterCL, Adapters
from protofed.methods.baselines.ccd import CCD
from protofed.methods.baselines.dual_lora import DualLoRA
from protofed.methods.baselines.ewc import EWC
from protofed.methods.baselines.experience_replay import ERFreq, ERRandom
from protofed.methods.baselines.finetune_last import FineTuneLast
from protofed.methods.baselines.full_retrain import FullRetrain
from protofed.methods.baselines.infer import Infer
from protofed.methods.baselines.lwf import LwF
from protofed.methods.baselines.mas import MAS
from protofed.methods.baselines.pcl import PCL
from protofed.methods.baselines.prefix_tuning import PrefixTuning
from protofed.methods.baselines.recicl import RecICL
from protofed.methods.baselines.reloop import ReLoop
from protofed.methods.baselines.reloop2 import ReLoop2
from protofed.methods.baselines.sail_piw import SailPIW
from protofed.methods.baselines.synaptic_intelligence import SynapticIntelligence
from protofed.methods.catalogue import METHODS, has_modes, private_by_itself
from protofed.methods.frozen import Frozen
from protofed.methods.noised_popularity import NoisedPopularity, release_asked
from protofed.methods.popularity import Popularity
from protofed.methods.protocol import Diagnostics, Method, Releasing, World
from protofed.methods.protofed_rules import streams_asked
from protofed.methods.scoring import refuse_prior
from protofed.privacy.accountant import check_ahead
from protofed.privacy.descent import Meter, PrivateDescent
from protofed.privacy.ledger import Ledger, Release
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice

STREAM = "gradients"


@dataclass(frozen=True, slots=True)
class Trainings:
    """How many private trainings a method makes in slice 1, and in each later one."""

    first: int = 1
    later: int = 1

    def in_slice(self, index: int) -> int:
        return self.first if index == 1 else self.later

    def until(self, index: int) -> int:
        """In slices 1 .. index."""
        return self.first * min(index, 1) + self.later * max(index - 1, 0)


ONE = Trainings()
WRAPPED: Mapping[type, Trainings] = {
    Frozen: Trainings(0, 0),
    FineTuneLast: ONE,
    FullRetrain: ONE,
    EWC: ONE,
    SynapticIntelligence: ONE,
    MAS: ONE,
    LwF: ONE,
    ReLoop: ONE,
    ERRandom: ONE,
    ERFreq: ONE,
    Infer: ONE,
    CCD: Trainings(2, 3),  # the first student is generated from the base block
    PrefixTuning: ONE,
    Adapters: ONE,
    AdapterCL: ONE,
    DualLoRA: Trainings(2, 2),  # the fast one and the slow one
    PCL: ONE,
    RecICL: Trainings(0, 0),
}
REFUSED: Mapping[type, str] = {
    SailPIW: "its weights are scaled to mean 1 over a batch of users, which ties users together",
    ReLoop2: "its memory holds errors of single raw events",
}


@dataclass(frozen=True, slots=True)
class PrivateState:
    """The method's own state, the noise of every round, and how many rounds there may be and have been."""

    inner: Any
    noise_multiplier: float
    allowed_rounds: int
    rounds: int
    slice_index: int


@dataclass(frozen=True, slots=True)
class Private:
    """A method whose every training is a fixed number of private steps, declared before they are made."""

    method: Method[Any]
    trainings: Trainings

    def start(self, world: World) -> PrivateState:
        """The method's own start, and the noise that all rounds of the whole stream together ask for."""
        check_private_settings(world.config)
        (steps,) = plan_releases(world.config.privacy, (self.steps_asked(world.config),))
        start = self.method.start(world)
        return PrivateState(start, steps.noise_multiplier, steps.rounds, 0, slice_index=world.base.index)

    def learn(
        self, world: World, state: PrivateState, slice_: TimeSlice, descend: Descend
    ) -> tuple[PrivateState, Diagnostics]:
        """The method's own learning on a private descent, whatever descent was handed in."""
        rounds = self._rounds_after(world.config.privacy, state, slice_.index)
        meter = Meter(state.rounds, rounds)
        inner, diagnostics = self.method.learn(world, state.inner, slice_, self._descent(world, state, slice_, meter))
        declared = self.trainings.in_slice(slice_.index) * world.config.privacy.rounds_per_slice
        if meter.asked != declared or meter.made != rounds - state.rounds:
            raise AssertionError(f"{declared} private rounds were declared, {meter.asked} asked for, {meter.made} made")
        learned = replace(state, inner=inner, rounds=rounds, slice_index=slice_.index)
        return learned, {**diagnostics, **meter.diagnostics(), "noise_multiplier": state.noise_multiplier}

    def steps_asked(self, config: RunConfig) -> Stream:
        """All private steps of the whole stream, with the noise that is given."""
        wanted = self.trainings.until(config.stream.n_slices) * config.privacy.rounds_per_slice
        return steps_stream(config.privacy, wanted, config.privacy.noise_multiplier)

    def _descent(self, world: World, state: PrivateState, slice_: TimeSlice, meter: Meter) -> PrivateDescent:
        privacy = world.config.privacy
        return PrivateDescent(
            seed=world.config.seed,
            noise_multiplier=state.noise_multiplier,
            sampling_rate=privacy.sampling_rate,
            clip_radius=privacy.clip_radius,
            rounds_per_training=privacy.rounds_per_slice,
            n_users=slice_.past.n_users,
            meter=meter,
        )

    def _rounds_after(self, privacy: PrivacyConfig, state: PrivateState, index: int) -> int:
        """Rounds made once slice `index` is learned; they end where the budget does."""
        return min(self.trainings.until(index) * privacy.rounds_per_slice, state.allowed_rounds)

    def score(self, world: World, state: PrivateState, queries: Queries) -> Float[Tensor, "B I"]:
        return self.method.score(world, state.inner, queries)

    def evidence(self, state: PrivateState) -> Evidence:
        return self.method.evidence(state.inner)

    def releases(self, world: World, state: PrivateState, slices_ahead: int = 0) -> Ledger:
        """All noised gradients so far and those of the next slices."""
        privacy = world.config.privacy
        done = self._rounds_after(privacy, state, state.slice_index + slices_ahead)
        return ledger((steps_stream(privacy, state.allowed_rounds, state.noise_multiplier),), {STREAM: done})


def steps_stream(privacy: PrivacyConfig, rounds: int, noise_multiplier: float) -> Stream:
    """What private steps release: sums of users' clipped gradients, noised."""
    return Stream(STREAM, privacy.sampling_rate, rounds, noise_multiplier)


def with_dp(method: Method[Any]) -> Private:
    """The method with private steps; one that looks at protected events in another way is refused with the reason."""
    kind = type(method)
    if kind not in WRAPPED:
        reason = REFUSED.get(kind, "nobody has shown that it looks at users through its steps alone")
        raise ConfigError(f"{kind.__name__} cannot be made private: {reason}; run it without a privacy budget")
    return Private(method, WRAPPED[kind])


def as_asked(method: Method[Any], config: RunConfig) -> Method[Any]:
    """The method as it is, or with private steps where the config wraps it and it has no mechanism of its own.

    What a private run cannot promise is refused here, before any work.
    """
    by_itself = private_by_itself(config.method, config.protofed.mode)
    if by_itself or config.privacy.wrap:
        check_given_noise(config)
    if by_itself:
        check_payable(config.privacy, streams_asked(config)[:1])
    if not config.privacy.wrap:
        return method
    check_private_settings(config)
    if isinstance(method, Popularity):
        check_payable(config.privacy, (release_asked(config),))
        return NoisedPopularity()
    if isinstance(method, Releasing):
        return method
    private = with_dp(method)
    check_payable(config.privacy, (private.steps_asked(config),))
    return private


def check_payable(privacy: PrivacyConfig, streams: Plan) -> None:
    """Refuse releases without a budget and without noise, and a budget that nothing here can solve the noise for."""
    check_paid(privacy, streams)
    if privacy.target_epsilon and any(one.rounds for one in streams):
        check_installed("dp-accounting")


def check_given_noise(config: RunConfig) -> None:
    """Refuse a noise without a budget whose ε could not be computed; with a budget, planning the rounds checks it."""
    privacy, rounds = config.privacy, config.stream.n_slices * config.privacy.rounds_per_slice
    if rounds and privacy.noise_multiplier and not privacy.target_epsilon:
        check_ahead((Release(privacy.noise_multiplier, privacy.sampling_rate, rounds),), trust=privacy.trust)


def check_private_settings(config: RunConfig) -> None:
    """Refuse settings under which private steps would promise what they do not keep."""
    if has_modes(config.method):
        mode = METHODS[config.method].private_mode
        raise ConfigError(f"privacy.wrap is for methods other than {config.method}, which is private in --mode {mode}")
    if config.privacy.trust != "central":
        raise ConfigError(f"private steps need privacy.trust = central, got {config.privacy.trust}")
    refuse_prior(config)
