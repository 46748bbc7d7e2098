import math
import torch
import softdelta.torch as sd


def draw(*shape, dtype=torch.float64, scale=1.0):
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype).requires_grad_()


def test_gated_delta_rule_is_the_recurrence():
    torch.manual_seed(1)
    B, T, H, HV, K, V = 2, 9, 2, 4, 5, 3
    q, k, v = draw(B, T, H, K), draw(B, T, H, K, scale=0.3), draw(B, T, HV, V)
    g, beta = (-torch.rand(B, T, HV, dtype=torch.float64)).requires_grad_(), torch.rand(B, T, HV, dtype=torch.float64)
    o, state = sd.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    S = torch.zeros(B, HV, K, V, dtype=torch.float64)
    rows = []
    for t in range(T):
        kt, qt = (x[:, t].repeat_interleave(HV // H, 1) for x in (k, q))
        S = S * g[:, t, :, None, None].exp()
        d = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, kt))
        S = S + kt[..., None] * d[..., None, :]
        rows.append(torch.einsum("bhkv,bhk->bhv", S, qt) / math.sqrt(K))
    truth = torch.stack(rows, 1)
    torch.testing.assert_close(o, truth)
    torch.testing.assert_close(state, S)
    do, dS = torch.randn_like(o), torch.randn_like(S)
    inputs = (q, k, v, g)
    for a, b in zip(torch.autograd.grad((o, state), inputs, (do, dS)), torch.autograd.grad((truth, S), inputs, (do, dS))):
        torch.testing.assert_close(a, b)


def test_sdpa_is_torch():
    torch.manual_seed(2)
    q, k, v = draw(2, 4, 7, 8), draw(2, 4, 9, 8), draw(2, 4, 9, 6)
    bias = draw(1, 4, 7, 9)
    o = sd.scaled_dot_product_attention(q, k, v, bias)
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
    torch.testing.assert_close(o, truth)
    do = torch.randn_like(o)
    for a, b in zip(torch.autograd.grad(o, (q, k, v, bias), do), torch.autograd.grad(truth, (q, k, v, bias), do)):
        torch.testing.assert_close(a, b)
