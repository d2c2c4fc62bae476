"""A backbone with more parameters around it, trained by the same loop and taken apart again afterwards."""

import copy

from torch import Generator, nn

from protofed.backbone.sasrec import CONTENT, SASRec, at_rest


class Extended(SASRec):
    """Shares the weights of the backbone it is made from; a subclass adds its own and changes what the blocks read.

    States keep the plain backbone and the additions apart, so that new rows and checkpoints work as for any method.
    """

    def __init__(self, backbone: SASRec) -> None:
        nn.Module.__init__(self)
        vars(self).update({name: copy.copy(value) for name, value in vars(backbone).items()})  # the tables, not weights


def plain(model: SASRec) -> SASRec:
    """A copy without what was added."""
    bare = SASRec(model.config, model.n_rows, Generator().manual_seed(0)).to(model.items.device)
    if model.content is not None:
        bare.register_module(CONTENT, copy.deepcopy(model.content))
    weights = model.state_dict()
    bare.load_state_dict({name: weights[name] for name in bare.state_dict()})
    return at_rest(bare)
