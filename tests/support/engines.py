"""Engines that share a model's measurements, so that a process measures once and not once per test."""

from __future__ import annotations

import weakref

from transformers import PreTrainedModel

from lp_runtime.calibration.calibration import Calibration, Measured
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Engine
from lp_runtime.model.runner import ModelRunner

_measured: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple, Measured]] = weakref.WeakKeyDictionary()


def engine_of(model: ModelRunner, group: Group | None = None) -> Engine:
    """Return a new engine, without drafts of earlier requests, that uses the shared measurements."""
    group = group or Group.alone()
    kind = (model.strict_tokens, model.graphs, model.device, group.size)
    known = _measured.setdefault(model.model, {}).setdefault(kind, Measured())
    return Engine(model, group, Calibration(model, group, None, known))
