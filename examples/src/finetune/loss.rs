//! The last matrix and the loss in one, some tokens at a time.

use burn::tensor::{
    DType, IndexingUpdateOp, Int, Tensor, TensorData, activation::log_softmax,
    backend::AutodiffBackend,
};
use burn_cp::{attention::ContextParallelBackend, sharder::CpStep};

use crate::data::IGNORED_LABEL;

/// This rank's part of a token-mean loss.
#[derive(Debug, Clone)]
pub struct ChunkedLoss<B: AutodiffBackend> {
    /// `[1]`; backward runs on it. Its gradients are those of the loss; its value is of no use.
    pub local: Tensor<B, 1>,
    /// Sum of the negative log-probabilities of this rank's labels, `[1]`, f32.
    pub sum: Tensor<B::InnerBackend, 1>,
}

/// Cross entropy of this rank's labels, divided by `num_labels`, from hidden states `[batch, local_tokens, hidden]` and the last matrix
/// `[hidden, vocab]`.
///
/// Logits of at most `chunk` tokens exist at a time, and none is kept: where the loss is the end of the graph, its gradients are known
/// as soon as its value is (Hsu et al., "Liger Kernel", 2024). The result is a function with just these gradients. No communication.
/// With `trains_matrix` false the matrix gets none. Labels must be below `vocab`; a batch that declares its vocabulary is checked for that.
pub fn linear_cross_entropy<B>(
    step: &CpStep<B>,
    hidden: Tensor<B, 3>,
    matrix: Tensor<B, 2>,
    (num_labels, chunk): (u64, usize),
    trains_matrix: bool,
) -> ChunkedLoss<B>
where
    B: ContextParallelBackend + AutodiffBackend,
{
    let [batch, tokens, width] = hidden.dims();
    let flat = hidden.reshape([batch * tokens, width]);
    let (rows, targets): (Vec<i64>, Vec<i64>) = (0_i64..)
        .zip(step.labels().unwrap_or_default())
        .filter(|(_, label)| **label != IGNORED_LABEL)
        .map(|(row, &label)| (row, label))
        .unzip();
    let (values, weights) = (flat.clone().inner(), matrix.clone().inner());
    let (device, dtype) = (values.device(), values.dtype());
    let mut sum = Tensor::<B::InnerBackend, 1>::zeros([1], (&device, DType::F32));
    let mut grad_values = values.zeros_like();
    let mut grad_matrix =
        Tensor::<B::InnerBackend, 2>::zeros(weights.dims(), (&device, DType::F32));
    #[allow(clippy::cast_precision_loss, reason = "a number of labels")]
    let scale = 1.0 / num_labels.max(1) as f64;
    for (rows, targets) in rows.chunks(chunk.max(1)).zip(targets.chunks(chunk.max(1))) {
        let num = rows.len();
        let at = Tensor::<B::InnerBackend, 1, Int>::from_data(
            TensorData::new(rows.to_vec(), [num]),
            &device,
        );
        let targets = Tensor::<B::InnerBackend, 2, Int>::from_data(
            TensorData::new(targets.to_vec(), [num, 1]),
            &device,
        );
        let x = values.clone().select(0, at.clone());
        let log_probabilities = log_softmax(x.clone().matmul(weights.clone()).cast(DType::F32), 1);
        sum = sum - log_probabilities.clone().gather(1, targets.clone()).sum();
        let ones = Tensor::<B::InnerBackend, 2>::ones([num, 1], (&device, DType::F32));
        let grad = log_probabilities
            .exp()
            .scatter(1, targets, ones.neg(), IndexingUpdateOp::Add)
            * scale;
        let grad = grad.cast(dtype);
        grad_values = grad_values.select_assign(
            0,
            at,
            grad.clone().matmul(weights.clone().transpose()),
            IndexingUpdateOp::Add,
        );
        if trains_matrix {
            grad_matrix = grad_matrix + x.transpose().matmul(grad).cast(DType::F32);
        }
    }
    let mut local = (flat * Tensor::from_inner(grad_values)).sum();
    if trains_matrix {
        local = local + (matrix * Tensor::from_inner(grad_matrix.cast(dtype))).sum();
    }
    ChunkedLoss { local, sum }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::backend::{Autodiff, Flex};
    use burn_cp::{
        batch::SequenceBatch,
        comm, launch,
        mesh::DeviceMesh,
        sharder::{ContextParallel, ContextParallelConfig},
    };

    use super::*;

    type B = Autodiff<Flex>;

    fn values<const D: usize>(shape: [usize; D], phase: f64) -> TensorData {
        let len = shape.iter().product::<usize>();
        TensorData::new(
            (0..len)
                .map(|at| (at as f64 * 0.7 + phase).sin() as f32)
                .collect::<Vec<_>>(),
            shape,
        )
    }

    /// Gradients of hidden states and matrix, and the loss, on rank 0 of two.
    fn on_rank_0(chunk: Option<usize>) -> [Vec<f32>; 3] {
        let ranks = launch::threads(
            2,
            |rank| -> Result<_, Box<dyn std::error::Error + Send + Sync>> {
                let groups = comm::bind(&DeviceMesh::new([("dp", 1), ("cp", 2)])?, &rank)?;
                let cp = ContextParallel::new(&groups, ContextParallelConfig::default())?;
                let device = Default::default();
                let labels: Vec<i64> = (0..2 * 9)
                    .map(|at| if at % 4 == 1 { IGNORED_LABEL } else { at % 7 })
                    .collect();
                let batch = SequenceBatch::<B>::from_ids(TensorData::zeros::<i64, _>([2, 9]))
                    .with_labels(TensorData::new(labels, [2, 9]));
                let step = cp.shard(batch, &device)?;
                let hidden =
                    Tensor::<B, 3>::from_data(values([2, step.local_len(), 5], 0.3), &device)
                        .require_grad();
                let matrix = Tensor::<B, 2>::from_data(values([5, 7], 1.1), &device).require_grad();
                let (loss, grads) = match chunk {
                    Some(chunk) => {
                        let num_labels = step.num_labels()?.global;
                        let loss = linear_cross_entropy(
                            &step,
                            hidden.clone(),
                            matrix.clone(),
                            (num_labels, chunk),
                            true,
                        );
                        let sums = cp.group().host_all_gather("sum", loss.sum.into_scalar())?;
                        (
                            sums.iter().sum::<f32>() / num_labels as f32,
                            loss.local.backward(),
                        )
                    }
                    None => {
                        let loss =
                            step.cross_entropy(hidden.clone().matmul(matrix.clone().unsqueeze()))?;
                        (loss.global_value() as f32, loss.backward())
                    }
                };
                let grad = |tensor: Option<TensorData>| {
                    tensor
                        .expect("a gradient")
                        .iter::<f32>()
                        .collect::<Vec<_>>()
                };
                Ok([
                    grad(hidden.grad(&grads).map(Tensor::into_data)),
                    grad(matrix.grad(&grads).map(Tensor::into_data)),
                    vec![loss],
                ])
            },
        );
        ranks.expect("a world").swap_remove(0)
    }

    #[test]
    fn chunks_give_the_loss_and_the_gradients_of_the_whole() {
        let whole = on_rank_0(None);
        for chunk in [1, 3, 100] {
            for (got, want) in on_rank_0(Some(chunk)).iter().zip(&whole) {
                let apart = got
                    .iter()
                    .zip(want)
                    .fold(0.0_f32, |worst, (got, want)| worst.max((got - want).abs()));
                assert!(
                    got.len() == want.len() && apart < 1e-6,
                    "chunk {chunk}: {apart}"
                );
            }
        }
    }
}
