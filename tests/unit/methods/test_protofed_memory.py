"""What a ProtoFed-SP client holds, counted number by number."""

import pytest
import worlds

from protofed.client.state import columns
from protofed.methods.protofed_sp import memory_of


def test_a_client_holds_model_encoders_prototypes_prompts_and_its_own_rows():
    learned = worlds.learn_once("protofed-sp")
    config, state = learned.world.config, learned.state
    met = int(state.devices.met.sum())
    told = memory_of(config, state, met)
    weights = [*state.backbone.parameters(), *state.backbone.buffers()]
    assert told["device_bytes_backbone"] == sum(w.numel() * w.element_size() for w in weights)
    k, width, length = state.library.n_prototypes, config.backbone.width, config.backbone.prompt_length
    assert told["device_bytes_prototypes"] == 4 * k * (config.protofed.embedding + length * width)
    d_z, flags, key = state.devices.drift.mean.shape[1], 5, 8  # met, active, contributes, use_prompt, use_rows
    prompts, drift, taste = 2 * length * width * 4, 2 * d_z * 4 + 4 + 8, width * 4
    assert told["device_bytes_prompts"] == key + prompts + drift + taste + flags + 4 * state.devices.losses.shape[1]
    assert len(columns(state.devices)) == 14  # every one of them is counted above
    assert told["device_bytes_rows"] == pytest.approx(len(state.devices.rows) * (4 * width + 8) / met)
    assert told["device_bytes_encoders"] > 0
