"""ProtoFed: ProtoFed-SP's devices under a head, and one dial for what may leave them.

What we implement: the devices of ProtoFed-SP (prompts, own item rows, drift) and on top a head of a few hundred
numbers. It weighs what the user's own past says about an item and what counts say, and is fitted once on the base
block, to the bare backbone's answers, among all items, at the ages at which it will be asked (`methods/headed.py`).
Under it each device chooses, by the user's own validation events, whether it uses its prompt, its rows, both or
neither. How it differs: `--share nothing` lets nothing leave a device after the base block: prototypes and counts stay
as the base block left them, and items that came later are known by what the device itself met. `--share private` adds
releases with noise out of one budget: prototypes as in ProtoFed-SP where base users' prompts pay under the head, rows
of new items and popularity where a rehearsal on the base block, under the same noise, says that they pay.
Privacy: ε = 0 for events after the base block at `nothing`, (ε, δ) at `private`; docs/privacy.md has the claim.
"""

from dataclasses import dataclass

from protofed.methods.protofed_sp import ProtoFedSP


@dataclass(frozen=True, slots=True)
class ProtoFed(ProtoFedSP):
    """What is under the head; `methods.headed.under_head` puts it on."""
