"""Engines that share what was measured of a model, so that it is measured once a process and not once a test."""

from __future__ import annotations

import weakref

from transformers import PreTrainedModel

from lp_runtime.calibration.calibration import Calibration, Measured
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Engine
from lp_runtime.model.runner import ModelRunner

_measured: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple, Measured]] = weakref.WeakKeyDictionary()


def engine_of(model: ModelRunner, group: Group | None = None) -> Engine:
    """An engine that keeps nothing of earlier requests, as one that measures for itself."""
    group = group or Group.alone()
    kind = (model.strict_tokens, model.graphs, model.device, group.size)
    known = _measured.setdefault(model.model, {}).setdefault(kind, Measured())
    return Engine(model, group, Calibration(model, group, None, known))
