//! Training a real multimodal model on N ranks equals training it on one.

use burn::backend::{
    Autodiff, NdArray,
    autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy, NoCheckpointing},
};
use burn_cp_examples::{
    models::{mimo_v2_flash::MimoV2FlashVlConfig, qwen3_vl::Qwen3VlConfig},
    train::{
        Architecture, Delivery, Device, Exchange, Layout, ModelSize, TrainConfig, Vision, grid,
        max_rel_diff, max_rel_grad_diff, product_rounding, train,
    },
};
use burn_cp_tests::DEVICE;

/// Every two ways of running the training meet in one of these cases; `compare-grid` runs all of them.
#[test]
fn every_pair_of_settings_trains_as_one_rank_does() {
    let mut cases = grid::pairwise(20);
    cases
        .iter_mut()
        .for_each(|case| case.config.device = DEVICE);
    let results = grid::run_cases(&cases, |_| {}).unwrap();
    let wrong: Vec<String> = results
        .iter()
        .filter_map(|result| Some(format!("{}: {}", result.case.name(), result.fault()?)))
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The tolerance of gradients on a device follows from what its products do to their inputs.
#[test]
fn products_keep_all_bits_of_their_inputs_or_ten() {
    let rounding = product_rounding(DEVICE);
    let kept = rounding == 0.0;
    assert!(
        kept || (2f64.powi(-12)..=2f64.powi(-10)).contains(&rounding),
        "{rounding:e}"
    );
    assert!(kept || DEVICE != Device::Cpu, "{rounding:e}");
}

/// In f64 nothing but the order of sums differs, so losses and all gradients agree far below any modelling error.
fn agrees_in_f64<A: Architecture, C: CheckpointStrategy>(freeze_vision: bool) {
    let base = TrainConfig::<A> {
        steps: 3,
        size: ModelSize::Tiny,
        tokens: 200,
        heldout_packs: 1,
        freeze_vision,
        ..TrainConfig::default()
    };
    let train = |config: &TrainConfig<A>| {
        train::<Autodiff<NdArray<f64>, C>, _>(config, None, false, true).unwrap()
    };
    let reference = train(&base.on_one_rank());
    for (ranks, dp, layout, exchange, vision) in [
        (
            2,
            1,
            Layout::Contiguous,
            Exchange::AllGather,
            Vision::Sharded,
        ),
        (
            4,
            1,
            Layout::HeadTail,
            Exchange::NeededOnly,
            Vision::Sharded,
        ),
        (
            4,
            2,
            Layout::Contiguous,
            Exchange::NeededOnly,
            Vision::Replicated,
        ),
        (
            3,
            1,
            Layout::HeadTail,
            Exchange::AllGather,
            Vision::Replicated,
        ),
    ] {
        let outcome = train(&TrainConfig {
            ranks,
            dp,
            layout,
            exchange,
            vision,
            vision_delivery: match layout {
                Layout::HeadTail => Delivery::ToConsumers,
                _ => Delivery::Gathered,
            },
            ..base.clone()
        });
        let loss = max_rel_diff(&outcome.losses, &reference.losses);
        let gradients =
            [&outcome, &reference].map(|outcome| outcome.first_gradients.clone().unwrap());
        let gradient = max_rel_grad_diff(&gradients[0], &gradients[1]);
        assert!(
            loss <= 1e-9 && gradient <= 1e-9,
            "{ranks} {dp} {layout:?} {exchange:?}: {loss:e} {gradient:e}"
        );
    }
}

#[test]
fn in_f64_losses_and_gradients_agree_to_nine_digits() {
    for freeze_vision in [false, true] {
        agrees_in_f64::<Qwen3VlConfig, NoCheckpointing>(freeze_vision);
        agrees_in_f64::<Qwen3VlConfig, BalancedCheckpointing>(freeze_vision);
    }
}

/// Windows, sinks and experts too; the loss has a part that balances experts over all tokens of a step.
#[test]
fn a_model_of_experts_agrees_in_f64() {
    agrees_in_f64::<MimoV2FlashVlConfig, NoCheckpointing>(false);
    agrees_in_f64::<MimoV2FlashVlConfig, BalancedCheckpointing>(true);
}
