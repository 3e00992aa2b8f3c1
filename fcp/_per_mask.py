"""What is found from the numbers of a mask, once: the layers of a step share it.

Problem. A kernel that follows its mask reads the mask's numbers, on the host, before it computes any. Once a layer that
would cost more than a small attention; on an accelerator each reading waits for the device.

Idea. What was found is kept beside the mask's positions while those live, under what else it was found from: the mask's
other tensors, as they are now, and the words of the call. A mask that was made anew from the same numbers, as a ring's
parts are in every layer, is recognised by the numbers; of those, the last used are kept.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fcp.masks import Mask

__all__ = ["PerMask"]

Found = TypeVar("Found")


class PerMask(Generic[Found]):
    """What is kept of one kind. What is found must not hold the mask's own positions: they would never be let go.

    Args:
        most: how many are kept by their masks' numbers.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Any = WeakIdKeyDictionary()
        self._by_numbers: OrderedDict[Any, Found] = OrderedDict()

    def get(self, mask: Mask, words: tuple[Hashable, ...], find: Callable[[], Found]) -> Found:
        """What `find` gave for this mask and these words, or gives now."""
        held = self._held.setdefault(mask.positions, {})
        # The other tensors are kept beside it: an id alone may come to be another tensor's.
        parts = _parts(mask)
        key = (*(None if x is None else (id(x), x._version) for x in parts), *words)
        if key not in held:
            held[key] = (parts[1:], find() if mask.whole else self._known(mask, parts, words, find))
        return held[key][1]

    def _known(
        self, mask: Mask, parts: tuple[Tensor | None, ...], words: tuple[Hashable, ...], find: Callable[[], Found]
    ) -> Found:
        numbers = (None if x is None else x.numpy(force=True).tobytes() for x in parts)
        key = (mask.positions.device, mask.positions.shape, mask.consecutive, words, *numbers)
        found = self._by_numbers.pop(key) if key in self._by_numbers else find()
        self._by_numbers[key] = found  # the last used is the last to go
        if len(self._by_numbers) > self._most:
            self._by_numbers.popitem(last=False)
        return found


def _parts(mask: Mask) -> tuple[Tensor | None, ...]:
    own = (mask.positions, mask.documents, mask.valid, mask.rows)
    return own if mask.keys is None else (*own, *_parts(mask.keys))
