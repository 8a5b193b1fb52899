"""A script's loop over the pieces of a batch: one, or several if the batch does not fit into memory.

If memory runs out in a piece's forward or backward, what the piece has left is dropped, this worker's cap is
lowered, and the same samples come again in smaller pieces. Their gradients are put together, each with the
weight of its samples, and are reduced once all are there. Other workers wait meanwhile, as for a slow worker.
They hear of the cap alone, which goes with this worker's report on its share
(`train/data/sharereports.py`). Source: docs/shares.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.tensors.outofmemory import is_out_of_memory, let_go
from atoll.tensors.torch_compat import next_node
from atoll.tensors.torch_patches import watch_zeroing
from atoll.train.api.prepared import Prepared
from atoll.train.data.batches import SampledBatches
from atoll.train.data.cutting import cut_out, samples_of
from atoll.train.gradients.backward import BackwardEnd
from atoll.train.gradients.samples import SampleMark


class Pieces:
    """This worker's cap, and the loops of its script over pieces of batches.

    Args:
        models: the prepared models.
        backward: the end of their backwards.
        batches: the batches on which they train.
        device: the device on which they train.
        cap: the most samples of a piece; 0: no limit.
        finds: True if a piece that does not fit is computed again, and lowers the cap.
        lowered: called with the cap, and the line for people, when the cap is lowered.

    Attributes:
        cap: the most samples of a piece by now; 0: no limit.
    """

    def __init__(
        self,
        models: Sequence[Prepared],
        backward: BackwardEnd,
        batches: SampledBatches,
        device: torch.device,
        *,
        cap: int,
        finds: bool,
        lowered: Callable[[int, str], None],
    ) -> None:
        self.models, self.backward, self.batches, self.device = models, backward, batches, device
        self.cap, self.finds, self._lowered = cap, finds, lowered
        self._fitted = 0  # the most samples that have fitted

    def of(self, batch: Any) -> Iterator[AbstractContextManager[Any]]:
        """Return the pieces of a batch; see `Session.pieces`."""
        if self.backward.in_piece:
            raise UserError("session.pieces was called inside a piece; call it once for each batch")
        known = self.batches.expected()
        samples = samples_of(batch, known)
        is_whole = any(model.is_whole for model in self.models) or not samples
        if is_whole or not (self.finds or 0 < self.cap < samples):
            return iter([nullcontext(batch)])
        return CutBatch(self, batch, samples, is_certain=samples in known).pieces()

    def cut(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return ranges of samples, as equal as can be and none above the cap."""
        samples = stop - start
        number = -(-samples // (self.cap or samples))
        ends = [start + samples * index // number for index in range(number + 1)]
        return list(itertools.pairwise(ends))

    def fitted(self, samples: int) -> None:
        """Note that a piece of this size has fitted."""
        self._fitted = max(self._fitted, samples)

    def lower(self, samples: int, error: BaseException) -> None:
        """Lower the cap: `samples` did not fit."""
        self._fitted = self._fitted if self._fitted < samples else 0
        self.cap = self._fitted if 2 * self._fitted >= samples else (samples + 1) // 2
        self._lowered(
            self.cap,
            f"ran out of memory for {samples} samples ({type(error).__name__}): they are computed again in "
            f"pieces, and it gets at most {self.cap} from now on",
        )


class CutBatch:
    """One batch of a script, and the gradients of its pieces."""

    def __init__(self, of: Pieces, batch: Any, samples: int, *, is_certain: bool) -> None:
        self.of, self._batch, self._samples, self._is_certain = of, batch, samples, is_certain
        self.models = list(of.models)
        self.counted = [each for model in self.models for each in model.models]
        self._before: dict[nn.Parameter, Tensor] = {}  # gradients from before the batch
        self._sums: dict[nn.Parameter, Tensor | None] = {}  # means of the gradients of the pieces so far
        self._weights = [0.0] * len(self.counted)  # of these pieces, by model
        self.is_apart = False  # True: gradients are put together before they are reduced

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces, and reduce the gradients of all of them together if they are several."""
        unwatch = watch_zeroing(self._zeroed)
        try:
            yield from self._pieces()
        finally:
            unwatch()
            self.of.backward.aside = ()

    def _pieces(self) -> Iterator[Piece]:
        of, left = self.of, self.of.cut(0, self._samples)
        self.is_apart = len(left) > 1
        self._put_aside()
        while left:
            start, stop = left[0]
            whole = (start, stop) == (0, self._samples)
            part = self._batch if whole else cut_out(self._batch, start, stop, self._samples)
            piece = Piece(self, part, stop - start, is_certain=self._is_certain)
            yield piece
            if piece.fits is None:
                raise UserError(
                    "session.pieces: a piece was not used in a with statement; write: for piece in "
                    "session.pieces(batch): with piece as batch: (forward and backward)"
                )
            if piece.fits:
                left = left[1:]
            else:
                self.is_apart, left = True, of.cut(start, self._samples)
        if self.is_apart:
            self._put_together()

    def _put_aside(self) -> None:
        """Set gradients aside that are there already, as those of earlier batches are under accumulation: a
        piece that does not fit would leave some of them changed."""
        for model in self.models:
            model.reducer.count_before()
            for parameter in model.parameters.values():
                if parameter.grad is not None:
                    self._before[parameter], parameter.grad = parameter.grad, None
        self.is_apart = self.is_apart or bool(self._before)
        self.of.backward.aside = self._before.keys()

    def _zeroed(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forget gradients from before the batch that the script has zeroed."""
        zeroed = [parameter for parameter in parameters if self._before.pop(parameter, None) is not None]
        if zeroed:
            for model in self.models:
                model.reducer.note_zeros(zeroed)

    @torch.no_grad()
    def add(self, marks: Sequence[SampleMark], samples: int) -> None:
        """Add the gradients of a piece of so many samples to those before, by the weight that was counted
        since `marks`."""
        for index, (model, mark) in enumerate(zip(self.counted, marks, strict=True)):
            counted = model.samples.since(mark)
            weight = float(samples) if counted is None else counted
            self._weights[index] += weight
            part = weight / self._weights[index] if weight else 0.0
            for parameter in model.parameters.values():
                new, parameter.grad = parameter.grad, None
                earlier = self._sums.get(parameter)
                if new is not None and part != 1:
                    new.mul_(part)
                if earlier is None:
                    self._sums[parameter] = new
                else:
                    earlier.mul_(1 - part)
                    if new is not None:
                        earlier.add_(new)

    @torch.no_grad()
    def _put_together(self) -> None:
        """Let parameters have the gradients of all pieces and from before, and reduce these as a backward
        does that ends here."""
        for model in self.models:
            for parameter in model.parameters.values():
                gradient, before = self._sums.get(parameter), self._before.get(parameter)
                if before is not None:
                    gradient = before if gradient is None else gradient.add_(before)
                parameter.grad = gradient
            model.reducer.watch.note_edits()
            if model.reducer.synchronous:
                model.reducer.watch.look_for_edits()
        self.of.backward.aside = ()
        if any(model.reducer.synchronous for model in self.models):
            self.of.backward.finish()


class Piece:
    """A context for the forward and backward of one piece of a batch, which gives the piece.

    Attributes:
        fits: True once the piece is computed; False if memory has run out in it; None before.
    """

    def __init__(self, of: CutBatch, part: Any, samples: int, *, is_certain: bool) -> None:
        self._of, self._part, self._samples, self._is_certain = of, part, samples, is_certain
        self.fits: bool | None = None

    def __enter__(self) -> Any:
        of, pieces = self._of, self._of.of
        self._marks = [model.samples.mark() for model in of.counted]
        self._unsent = [model.reducer.phase.unsent for model in of.models]
        self._ways = [(model.reducer.synchronous, model.reducer.sends_early) for model in of.models]
        self._buffers = [model.buffers.copies() for model in of.models] if pieces.finds else []
        self._ends = pieces.backward.ends
        self._since = next_node() if pieces.finds else 0
        for model in of.models:
            reducer = model.reducer
            reducer.synchronous = reducer.synchronous and not of.is_apart
            reducer.sends_early = reducer.sends_early and reducer.sum.sends_again
        pieces.backward.in_piece = True
        pieces.batches.begin_piece(float(self._samples) if self._is_certain else 0.0)
        return self._part

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        of, pieces = self._of, self._of.of
        pieces.backward.in_piece = False
        for model, (synchronous, early) in zip(of.models, self._ways, strict=True):
            model.reducer.synchronous, model.reducer.sends_early = synchronous, early
        again = error is not None and trace is not None and self._may_be_repeated(error)
        pieces.batches.end_piece(again=again)
        if again and error is not None and trace is not None:
            self._undo()
            let_go(trace.tb_frame, self._since, pieces.device)
            pieces.lower(self._samples, error)
            self.fits = False
        elif error is None:
            pieces.fitted(self._samples)
            if of.is_apart:
                of.add(self._marks, self._samples)
            self.fits = True
        return again

    def _may_be_repeated(self, error: BaseException) -> bool:
        """True if memory has run out for more than one sample, and before anything was reduced: other workers
        would have gone on."""
        pieces = self._of.of
        may_repeat = pieces.finds and self._samples > 1 and is_out_of_memory(error)
        return may_repeat and pieces.backward.ends == self._ends

    def _undo(self) -> None:
        """Leave everything as it was before the piece."""
        self._of.of.backward.repeat()
        for counted, mark in zip(self._of.counted, self._marks, strict=True):
            counted.samples.back_to(mark)
        for model, unsent in zip(self._of.models, self._unsent, strict=True):
            model.reducer.phase.unsent = unsent
            for parameter in model.parameters.values():
                parameter.grad = None
        for model, copies in zip(self._of.models, self._buffers, strict=True):
            model.buffers.put_back(copies)
