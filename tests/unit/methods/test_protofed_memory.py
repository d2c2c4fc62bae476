"""What a ProtoFed-SP client holds, counted number by number."""

from dataclasses import fields

import pytest
import worlds

from protofed.methods.protofed_sp import memory_of


def test_a_client_holds_model_encoders_prototypes_prompts_and_its_own_rows():
    learned = worlds.learn_once("protofed-sp")
    config, state = learned.world.config, learned.state
    devices = int(state.table.met.sum())
    told = memory_of(config, state, devices)
    weights = [*state.backbone.parameters(), *state.backbone.buffers()]
    assert told["device_bytes_backbone"] == sum(w.numel() * w.element_size() for w in weights)
    k, width, length = state.library.n_prototypes, config.backbone.width, config.backbone.prompt_length
    assert told["device_bytes_prototypes"] == 4 * k * (config.protofed.embedding + length * width)
    d_z = state.table.mean.shape[1]
    prompts, drift, rest = 2 * length * width * 4, 2 * d_z * 4 + 4 + 8, 1 + 4 * state.table.losses.shape[1]
    assert told["device_bytes_prompts"] == prompts + drift + rest
    assert told["device_bytes_rows"] == pytest.approx(len(state.rows) * (4 * width + 8) / devices)
    assert len(fields(state.table)) == 8
    assert told["device_bytes_encoders"] > 0
