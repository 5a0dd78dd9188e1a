"""Weights of a trainer reach a server through a directory."""

from pathlib import Path

import pytest
import torch

from longtail.errors import ConfigError, UnavailableError
from longtail.integrations.directory_transfer import DirectoryTransfer
from longtail.model.hf.weights import to_hf
from support.serving import NAME, live, make_engine, make_model_server
from support.tiny_models import tiny_model

TOKEN = "a-token-of-enough-letters"


@pytest.mark.slow
def test_the_server_generates_with_the_weights_that_were_sent(tmp_path: Path) -> None:
    body = {"model": NAME, "prompt": "3+4=", "max_tokens": 12, "seed": 5}
    server = make_model_server(make_engine(), rl_dir=tmp_path, admin_token=TOKEN)
    with live(server) as client:
        first = client.post("/v1/completions", json=body).json()
        transfer = DirectoryTransfer(f"{client.base_url}/v1", tmp_path, admin_token=TOKEN)
        transfer.init_weight_transfer()
        for version, seed in ((1, 1), (2, 0)):
            model = tiny_model(seed=seed, dtype=torch.float64)
            tensors = to_hf(dict(model.named_parameters()), model.config)
            transfer.pause()
            transfer.send_weights(iter(tensors.items()))
            transfer.resume()
            found = client.post("/v1/completions", json=body).json()
            assert found["longtail"]["policy_version"] == transfer.version == version
            assert (found["choices"] == first["choices"]) == (seed == 0)
        assert [path.name for path in tmp_path.iterdir()] == ["update-2"]
        del tensors["model.norm.weight"]
        with pytest.raises(ConfigError, match=r"lacks model\.norm\.weight"):
            transfer.send_weights(iter(tensors.items()))
        with pytest.raises(ConfigError, match="admin token"):
            DirectoryTransfer(str(client.base_url), tmp_path).pause()
        transfer.destroy()
    with pytest.raises(UnavailableError, match="did not answer"):
        DirectoryTransfer(str(client.base_url), tmp_path, timeout_s=0.0).init_weight_transfer()
    with pytest.raises(UnavailableError, match="no answer"):
        transfer.resume()
