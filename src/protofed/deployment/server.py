"""The server of a federation: its own loop over the rounds of a slice, whatever carries orders and answers.

It goes on from its folder. The ledger is written ahead of every release; a round that was begun by a server that died
counts as released and is never asked for again.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from protofed.backbone.sasrec import SASRec
from protofed.config import RunConfig, from_toml
from protofed.deployment.orders import Ask, Cut, Heard, Order
from protofed.deployment.store import bytes_of, state_of
from protofed.errors import RunFolderError
from protofed.federation.newcomers import (
    Newcomers,
    add_introductions,
    mean_of,
    without_base_row,
)
from protofed.federation.rounds import server_noise, timetable
from protofed.files import make_folder, write_text, written_atomically
from protofed.inference.folder import load
from protofed.methods.protofed_rules import as_run, local_rule, uploads_happen
from protofed.privacy.ledger import Ledger, NoiseSource, Release, read_ledger, record_ahead, streams, write_ledger
from protofed.privacy.mechanism import Noise, os_noise, seeded_noise
from protofed.privacy.upload import RoundRule
from protofed.seeds import stream
from protofed.server.accept import Accepted, accept
from protofed.server.aggregate import server_aggregate, slice_end
from protofed.server.library import PrototypeLibrary
from protofed.server.newcomers import predict_rows

CUTS, STATE, LEDGER, LOG, SEEDED = "cuts.json", "server.safetensors", "ledger.json", "log.jsonl", "seeded"
ROUNDS, ITEMS = "prototypes", "new items"  # the streams of the ledger


@dataclass(frozen=True, slots=True)
class ServerState:
    """All that a server carries from round to round; nothing in it belongs to a user."""

    library: PrototypeLibrary
    newcomers: Newcomers
    newcomer_noise: float
    rule: RoundRule
    allowed_rounds: int
    rounds: int = 0  # over all slices, those that a dead server had begun included
    index: int = 0  # the newest finished slice
    introduced: int = 0  # the newest slice whose new items were added up


@dataclass(frozen=True, slots=True)
class Server:
    """A server's folder and what never changes in it."""

    folder: Path
    public: SASRec  # the backbone as the base block left it
    config: RunConfig
    cuts: tuple[Cut, ...]
    seeded: bool

    @property
    def noise_source(self) -> NoiseSource:
        return "seed" if self.seeded else "operating-system"

    def noise(self, round_: int) -> Noise:
        """A round's noise."""
        return server_noise(self.config.seed, round_) if self.seeded else os_noise

    def read_state(self) -> ServerState:
        """The newest state, with rounds and releases that the ledger has and it has not counted as made."""
        made: ServerState = state_of((self.folder / STATE).read_bytes())
        begun = streams(self.ledger())
        return replace(
            made,
            rounds=max(made.rounds, begun.get(ROUNDS, 0)),
            introduced=max(made.introduced, begun.get(ITEMS, 0)),
        )

    def keep(self, state: ServerState) -> ServerState:
        """The state, once it is on disk."""
        with written_atomically(self.folder / STATE) as unfinished:
            unfinished.write_bytes(bytes_of(state))
        return state

    def ledger(self) -> Ledger:
        return read_ledger(self.folder / LEDGER)[0]

    def release(self, release: Release) -> None:
        """The ledger with one more release, before it is made."""
        if release.noise_multiplier:
            trust = self.config.privacy.trust
            record_ahead(self.folder / LEDGER, self.ledger(), release, trust=trust, noise=self.noise_source)

    def tell(self, **record: object) -> None:
        """One more line of the log."""
        with open(self.folder / LOG, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def write_server(folder: Path, state: ServerState, cuts: tuple[Cut, ...], *, seeded: bool) -> None:
    """A model's folder made that of a server that has yet to begin."""
    make_folder(folder)
    fields = Cut.__dataclass_fields__
    write_text(folder / CUTS, json.dumps([{name: getattr(cut, name) for name in fields} for cut in cuts]) + "\n")
    if seeded:
        write_text(folder / SEEDED, "the draws and the noise of this federation can be repeated: for simulation\n")
    write_ledger(folder / LEDGER, (), trust=state.rule.trust, noise="seed" if seeded else "operating-system")
    with written_atomically(folder / STATE) as unfinished:
        unfinished.write_bytes(bytes_of(state))


def read_server(folder: Path) -> Server:
    """The server of a folder."""
    if not (folder / STATE).is_file():
        raise RunFolderError(f"no federation at {folder}; make one with `protofed federate --prepare`")
    given = load(folder)
    cuts = read_cuts(folder / CUTS)
    return Server(folder, given.model.backbone, from_toml(given.settings), cuts, (folder / SEEDED).is_file())


def read_cuts(file: Path) -> tuple[Cut, ...]:
    """The edges of all slices."""
    try:
        return tuple(Cut(**cut) for cut in json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as problem:
        said = str(problem).splitlines()[0]
        raise RunFolderError(f"{file} cannot be read ({said}); copy it from where the federation began") from problem


def serve_slices(folder: Path, until: int, ask: Ask) -> ServerState:
    """The state after slice `until`, every slice before it that is not finished included."""
    server = read_server(folder)
    state = server.read_state()
    for cut in server.cuts[state.index : until]:
        state = serve_slice(server, state, server.cuts[: cut.index], ask)
    return state


def serve_slice(server: Server, state: ServerState, cuts: tuple[Cut, ...], ask: Ask) -> ServerState:
    """The state after the newest of these slices: new items, rounds as far as the budget goes, the slice's end."""
    cut, config = cuts[-1], as_run(server.config)
    if state.newcomer_noise and state.introduced < cut.index:
        state = add_new_items(server, state, cuts, ask)
    rows = rows_of(server, state, cut)
    for round_, steps in rounds_of(config, state, cut):
        if round_ < state.rounds:
            continue  # begun by a server that died: it is spent
        server.release(Release(state.rule.noise_multiplier, config.privacy.sampling_rate, 1, ROUNDS))
        heard = ask(Order("upload", cuts, state.library.broadcast(), round_, steps, rows))
        state = server.keep(aggregated(server, state, heard, round_))
    library = state.library
    if rounds_of(config, state, cut):
        library, _ = slice_end(library, state.rule, stream(config.seed, "pruning", cut.index))
    heard = ask(Order("finish", cuts, library.broadcast(), rows=rows))
    server.tell(slice=cut.index, finished=heard.asked - len(heard.lost), asked=heard.asked, lost=heard.lost)
    return server.keep(replace(state, library=library, index=cut.index))


def rounds_of(config: RunConfig, state: ServerState, cut: Cut) -> list[tuple[int, int]]:
    """A slice's rounds, numbered over the whole stream, each with the local steps before it; fixed ahead."""
    each = config.privacy.rounds_per_slice
    first = (cut.index - 1) * each
    last = min(first + each, state.allowed_rounds) if uploads_happen(config) else first
    planned, steps = [], 0
    for what, number in timetable(local_rule(config).steps, max(0, last - first)):
        if what == "step":
            steps = number + 1
        else:
            planned.append((first + number, steps))
    return planned


def aggregated(server: Server, state: ServerState, heard: Heard, round_: int) -> ServerState:
    """The state after a round of what was heard in time; what is late, double or of another round is refused."""
    accepted = accepted_of(state, heard, round_)
    parting = stream(server.config.seed, "separation", round_)
    library, report = server_aggregate(state.library, accepted, state.rule, server.noise(round_), parting)
    server.tell(
        round=round_,
        uploads=report.uploads,
        refused=dict(accepted.refused),
        asked=heard.asked,
        lost=heard.lost,
    )
    return replace(state, library=library, rounds=round_ + 1)


def accepted_of(state: ServerState, heard: Heard, round_: int) -> Accepted:
    """What can be used of what was heard: uploads one by one, or their sum where the server sees nothing else."""
    uploads = (upload for each in heard.answers for upload in each.uploads)
    if state.rule.form != "integers":
        return accept(uploads, state.rule, round_=round_, version=state.library.version)
    n, total = heard.total or (0, None)
    return Accepted(n, torch.zeros(0, 1, state.rule.upload.width), torch.zeros(0, dtype=torch.int64), total)


def add_new_items(server: Server, state: ServerState, cuts: tuple[Cut, ...], ask: Ask) -> ServerState:
    """The state with one more release of what devices said of new items."""
    cut = cuts[-1]
    server.release(Release(state.newcomer_noise, 1.0, 1, ITEMS))
    heard = ask(Order("introduce", cuts, state.library.broadcast()))
    uploads = [each.items for each in heard.answers if each.items is not None]
    noise = seeded_noise(stream(server.config.seed, "newcomer noise", cut.index)) if server.seeded else os_noise
    wanted = without_base_row(server.public, cut.train_items)
    newcomers, n = add_introductions(state.newcomers, uploads, wanted, cut.index, state.newcomer_noise, noise)
    server.tell(slice=cut.index, introducing=n, asked=heard.asked, lost=heard.lost)
    return server.keep(replace(state, newcomers=newcomers, introduced=cut.index))


def rows_of(server: Server, state: ServerState, cut: Cut) -> Float[Tensor, "n d"] | None:
    """The rows of all items that the base block did not teach; None where devices start without."""
    if not state.newcomer_noise:
        return None
    wanted = without_base_row(server.public, cut.train_items)
    told = padded(state.newcomers, len(wanted))
    return predict_rows(told.sums[wanted], told.exposures[wanted], told.maps, mean_of(server.public))


def padded(newcomers: Newcomers, n_items: int) -> Newcomers:
    """The sums for a catalogue of so many items: nothing was told of those that came since."""
    more = n_items - len(newcomers.sums)
    sums = torch.nn.functional.pad(newcomers.sums, (0, 0, 0, more))
    return replace(newcomers, sums=sums, exposures=torch.nn.functional.pad(newcomers.exposures, (0, more)))
