"""The private ground of PyTorch that farspan leans on: a test for each, which says what to use
where it is gone.

They are what a newer torch may break first (`pyproject.toml` bounds it above for that).
"""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from farspan.runtime.comm import tcp


def test_fused_adamw_updates_as_the_public_optimizer_does():
    """`torch._fused_adamw_`, in runtime/state/train_state.py. Instead:
    torch.optim.AdamW(fused=True) on one parameter that views the bucket."""
    torch.manual_seed(0)
    public = torch.nn.Parameter(torch.randn(1000))
    private = public.detach().clone()
    gradient = torch.randn(1000)
    optimizer = torch.optim.AdamW([public], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    moments = torch.zeros(1000)
    squares = torch.zeros(1000)
    step = torch.tensor(0.0)
    for _ in range(3):
        public.grad = gradient.clone()
        optimizer.step()
        step += 1
        torch._fused_adamw_(
            [private],
            [gradient.clone()],
            [moments],
            [squares],
            [],
            [step],
            lr=1e-2,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )
    torch.testing.assert_close(private, public.detach(), rtol=1e-6, atol=1e-7)


def test_the_backward_pass_of_softmax_is_the_formulas():
    """`torch._softmax_backward_data`, in runtime/model/kernels.py. Instead: p * (dp - (p *
    dp).sum(-1, keepdim=True)), one pass over the scores more."""
    p = torch.randn(4, 9).softmax(-1)
    dp = torch.randn(4, 9)
    expected = p * (dp - (p * dp).sum(-1, keepdim=True))
    torch.testing.assert_close(torch._softmax_backward_data(dp, p, -1, p.dtype), expected)


def test_torch_reports_whether_the_cpu_supports_amx_and_bf16():
    """`torch.cpu._is_amx_tile_supported` in retrieval/pooling.py and
    `torch.ops.mkldnn._is_mkldnn_bf16_supported` in runtime/device.py. Instead: the flags of
    /proc/cpuinfo."""
    assert isinstance(torch.cpu._is_amx_tile_supported(), bool)
    if torch.backends.mkldnn.is_available():
        assert isinstance(torch.ops.mkldnn._is_mkldnn_bf16_supported(), bool)


def test_a_store_listens_on_the_socket_that_it_is_given():
    """`master_listen_fd` of TCPStore, in runtime/comm/worker_group.py; its documentation does not
    name it. Instead: nothing that listens on one address only; a store of our own."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        None,
        True,
        timedelta(seconds=5),
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )
    other = dist.TCPStore(
        "127.0.0.1", port, None, False, timedelta(seconds=5), wait_for_workers=False
    )
    other.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), 2)


def test_gloo_names_the_address_of_a_connection_that_broke():
    """The text of gloo's errors, in runtime/comm/tcp.py (`named_in`): which worker an exchange
    failed with is told in it alone. Instead: heartbeats, which notice later."""
    said = "[../gloo/transport/tcp/pair.cc:525] Connection closed by peer [10.0.0.2]:34567"
    assert tcp.named_in(said) == ["[10.0.0.2]:34567"]
    assert tcp.named_in("no address") == []


def test_a_cpu_reports_whether_it_multiplies_in_bf16():
    """`torch.cpu._is_avx512_bf16_supported` in retrieval/encoders/torch_forward.py.

    Instead: look for avx512_bf16 in /proc/cpuinfo.
    """
    assert isinstance(torch.cpu._is_avx512_bf16_supported(), bool)
