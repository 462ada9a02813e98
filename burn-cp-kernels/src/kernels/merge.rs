//! Two results of attention over disjoint sets of keys, made one.

use cubecl::prelude::*;

/// One vector of one row per unit. With `lse = ln(exp(lse_a) + exp(lse_b))`, the output over both sets is
/// `out_a · exp(lse_a - lse) + out_b · exp(lse_b - lse)` (Milakov and Gimelshein, 2018, arXiv:1805.02867). All tensors have the shape
/// `[batch, num_heads, tokens, ..]`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn merge<A: Float, B: Float, O: Float, N: Size>(
    first: &Tensor<Vector<A, N>>,
    first_lse: &Tensor<f32>,
    second: &Tensor<Vector<B, N>>,
    second_lse: &Tensor<f32>,
    out: &mut Tensor<Vector<O, N>>,
    lse: &mut Tensor<f32>,
    minus_infinity: f32,
    num_vectors: usize,
    #[comptime] per_row: usize,
    #[define(A, B, O)] _dtypes: [StorageType; 3],
) {
    let at = ABSOLUTE_POS;
    if at >= num_vectors {
        terminate!();
    }
    let size = N::value();
    let row = at / per_row;
    let vector = at % per_row;
    let token = row % lse.shape(2);
    let head = row / lse.shape(2) % lse.shape(1);
    let batch = row / lse.shape(2) / lse.shape(1);
    let a = first_lse[place::<f32>(first_lse, batch, head, token)];
    let b = second_lse[place::<f32>(second_lse, batch, head, token)];
    // Not -inf, of which no difference is taken.
    let max = f32::max(f32::max(a, b), f32::new(-1e30));
    let a = select(a == minus_infinity, f32::new(0.0), f32::exp(a - max));
    let b = select(b == minus_infinity, f32::new(0.0), f32::exp(b - max));
    // The larger share is 1, or both are 0 where no key is seen.
    let sum = f32::max(a + b, f32::new(1.0));
    let a_at = place::<Vector<A, N>>(first, batch, head, token) / size;
    let b_at = place::<Vector<B, N>>(second, batch, head, token) / size;
    let o_at = place::<Vector<O, N>>(out, batch, head, token) / size;
    let own = Vector::<f32, N>::cast_from(first[a_at + vector]) * Vector::new(a / sum);
    let other = Vector::<f32, N>::cast_from(second[b_at + vector]) * Vector::new(b / sum);
    out[o_at + vector] = Vector::cast_from(own + other);
    if vector == 0 {
        let seen = max + f32::ln(sum);
        let l_at = place::<f32>(lse, batch, head, token);
        lse[l_at] = select(a + b == f32::new(0.0), minus_infinity, seen);
    }
}

/// The number of a row's first element.
#[cube]
fn place<T: CubePrimitive>(tensor: &Tensor<T>, batch: usize, head: usize, token: usize) -> usize {
    batch * tensor.stride(0) + head * tensor.stride(1) + token * tensor.stride(2)
}
