//! Concatenation that other threads' backward passes cannot cut from the graph.

use burn::tensor::{BasicOps, Tensor, backend::Backend};

/// `Tensor::cat`, for models whose ranks are threads: `tensors` side by side along `dim`, `[.., len_i, ..]` -> `[.., Σ len_i, ..]`. Local; panics as
/// `Tensor::cat` does.
///
/// The backward pass of any thread ends by freeing what no tensor refers to any more, in the graphs of all threads. Burn 0.21's
/// own `cat` lets go of its inputs before its result stands in the graph; where nothing else refers to that graph, and the
/// parameters behind it were part of an earlier backward pass (accumulation, chunks), the inputs' gradients are lost without a
/// word. This one holds them until the result is there.
pub fn cat<B: Backend, const D: usize, K: BasicOps<B>>(
    tensors: Vec<Tensor<B, D, K>>,
    dim: usize,
) -> Tensor<B, D, K> {
    let held = tensors.clone();
    let joined = Tensor::cat(tensors, dim);
    drop(held);
    joined
}
