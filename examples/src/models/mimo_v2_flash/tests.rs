//! Routers, and what the model refuses; whole models are tested over ranks elsewhere.

use burn::{
    backend::{Autodiff, Flex},
    module::Module,
    tensor::TensorData,
};
use burn_cp::{
    batch::SequenceBatch,
    comm, launch,
    layout::Documents,
    mesh::DeviceMesh,
    plan::ExchangeStrategy,
    sharder::{ContextParallel, ContextParallelConfig},
};

use super::*;

type B = Autodiff<Flex>;

fn config() -> MimoV2FlashConfig {
    MimoV2FlashVlConfig::tiny().text_config
}

/// Documents of 5 and 3 tokens, and 2 of padding.
fn batch() -> SequenceBatch<B> {
    let ids: Vec<i64> = (3..13).collect();
    SequenceBatch::from_ids(TensorData::new(ids, [1, 10]))
        .with_documents(Documents::from_lengths(&[vec![5, 3]], 10).expect("they fit"))
}

fn step(batch: SequenceBatch<B>) -> CpStep<B> {
    let cp = ContextParallel::solo(ContextParallelConfig::default());
    cp.shard(batch, &Default::default()).expect("a legal batch")
}

#[test]
fn equal_scores_have_the_least_balance_loss_whatever_is_chosen() {
    // Zeros for weights: every expert scores 1/2 for every token, and the first two are chosen.
    let model = config().build::<B>(&Default::default()).unwrap();
    let step = step(batch());
    let (_, routing) = model.model.forward(&step).unwrap();
    let counts: Vec<&[u64]> = routing.counts().collect();
    assert_eq!(counts, [[8, 8, 0, 0], [8, 8, 0, 0]]);
    let loss: f32 = routing.balance(&step).unwrap().into_scalar();
    assert!((loss - 2.0).abs() < 1e-6, "1 for each layer: {loss}");
}

#[test]
fn correction_biases_are_not_trained_and_choose_without_weighing() {
    let vl = MimoV2FlashVlConfig::tiny();
    let model = vl.init::<B>(&Default::default(), 5).unwrap();
    let bias = |model: &MimoV2FlashVl<B>| match &model.language_model.model.layers[1].mlp {
        FeedForward::Sparse(experts) => experts.gate.e_score_correction_bias.clone(),
        FeedForward::Dense(_) => panic!("the second layer has experts"),
    };
    assert!(!bias(&model).val().is_require_grad());
    let record = model.clone().into_record();
    assert!(
        !bias(&model.clone().load_record(record))
            .val()
            .is_require_grad()
    );

    let chosen = |model: &MimoV2FlashVl<B>| {
        let (hidden, routing) = model.language_model.model.forward(&step(batch())).unwrap();
        let counts: Vec<Vec<u64>> = routing.counts().map(<[u64]>::to_vec).collect();
        (hidden.into_data(), counts)
    };
    let with_bias = |value: f32| {
        let mut model = model.clone();
        for layer in &mut model.language_model.model.layers {
            if let FeedForward::Sparse(experts) = &mut layer.mlp {
                let bias = &mut experts.gate.e_score_correction_bias;
                *bias = bias.clone().map(|bias| bias + value);
            }
        }
        model
    };
    // The same for all experts: nothing changes, least of all the weights.
    assert_eq!(chosen(&with_bias(3.0)), chosen(&model));
    let mut only = model.clone();
    for layer in &mut only.language_model.model.layers {
        if let FeedForward::Sparse(experts) = &mut layer.mlp {
            let bias = Tensor::from_data([0.0, 0.0, 9.0, 9.0], &Default::default());
            experts.gate.e_score_correction_bias =
                burn::module::Param::initialized(burn::module::ParamId::new(), bias);
        }
    }
    assert_eq!(chosen(&only).1, [[0, 0, 8, 8], [0, 0, 8, 8]]);
}

#[test]
fn positions_on_three_axes_are_refused() {
    let model = config().build::<B>(&Default::default()).unwrap();
    let positions: Vec<i64> = (0..30).map(|at| at % 10).collect();
    let batch = batch().with_positions(TensorData::new(positions, [3, 1, 10]));
    let error = model.model.forward(&step(batch)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("axes of the positions: expected 1, got 3"),
        "{error}"
    );
}

#[test]
fn heads_that_ranks_do_not_divide_are_refused_on_every_rank() {
    let mesh = DeviceMesh::new([("dp", 1), ("cp", 4)]).unwrap();
    let errors = launch::threads(4, |rank| {
        let groups = comm::bind(&mesh, &rank)?;
        let config = ContextParallelConfig {
            exchange: ExchangeStrategy::HeadAllToAll,
            ..ContextParallelConfig::default()
        };
        let cp = ContextParallel::new(&groups, config).expect("a legal configuration");
        let device = Default::default();
        let model = self::config().build::<B>(&device).expect("a valid one");
        let step = cp.shard(batch(), &device).expect("a legal batch");
        // Layers with a window have four heads of keys and values, the others two.
        let error = model.model.forward(&step).expect_err("two heads");
        Ok::<_, comm::CommError>(error.to_string())
    })
    .unwrap();
    for error in errors {
        assert!(error.contains("4 ranks divide, got 2"), "{error}");
    }
}
