//! Answers: keys and values kept give what a whole forward pass gives, and what the reference gives.

use burn::{
    backend::Flex,
    tensor::{FloatDType, Tensor},
};
use burn_cp::{
    batch::SequenceBatch,
    comm, launch,
    mesh::DeviceMesh,
    nn::SequenceModel,
    sharder::{ContextParallel, ContextParallelConfig},
};
use burn_cp_examples::{
    data::{Document, IGNORED_LABEL, Marks, Pack},
    generate::Generator,
    hf::{Message, ModelDirectory},
    models::qwen3_vl::Qwen3Vl,
    train::to_batch,
};
use serde::Deserialize;

use crate::fixture::{Case, directory, folder};

#[derive(Deserialize)]
struct Recorded {
    messages: Vec<Message>,
    ids: Vec<i64>,
    new: Vec<i64>,
}

fn values<const D: usize>(tensor: Tensor<Flex, D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

fn likeliest(logits: &[f32]) -> i64 {
    let at = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    at.unwrap() as i64
}

#[test]
fn the_likeliest_answer_is_that_of_the_reference() {
    for model in ["untied", "tied"] {
        let text =
            std::fs::read_to_string(folder().join(format!("{model}-generated.json"))).unwrap();
        let recorded: Recorded = serde_json::from_str(&text).unwrap();
        let directory = directory(model);
        let document = directory
            .processor()
            .document(&recorded.messages, &folder().join("pictures"), true)
            .unwrap();
        assert_eq!(document.ids, recorded.ids);
        let loaded = directory
            .load::<Flex>(&Default::default(), FloatDType::F32)
            .unwrap();
        let mut generator = Generator::new(&loaded, directory.config(), Default::default());
        let logits = values(generator.prompt(&document).unwrap());
        let vocab = directory.config().text_config.vocab_size;
        let mut next = likeliest(&logits[logits.len() - vocab..]);
        let mut new = Vec::new();
        for _ in &recorded.new {
            new.push(next);
            next = likeliest(&values(generator.token(next)));
        }
        assert_eq!(new, recorded.new, "{model}");
    }
}

/// Logits `[tokens, vocab]` of a whole forward pass.
fn whole(model: &Qwen3Vl<Flex>, document: &Document, directory: &ModelDirectory) -> Vec<f32> {
    let config = directory.config();
    let marks = Marks {
        padding: 0,
        image: config.image_token_id,
        video: config.video_token_id,
    };
    let pack = Pack::from_documents(vec![document.clone()], document.len(), marks);
    let ranks = launch::threads(
        1,
        |rank| -> Result<_, Box<dyn std::error::Error + Send + Sync>> {
            let groups = comm::bind(&DeviceMesh::new([("dp", 1), ("cp", 1)])?, &rank)?;
            let cp = ContextParallel::new(&groups, ContextParallelConfig::default())?;
            let vocab = config.text_config.vocab_size;
            let batch: SequenceBatch<Flex> = to_batch(
                std::slice::from_ref(&pack),
                &directory.processor().shape(),
                vocab,
                None,
                &Default::default(),
            )?;
            Ok(values(
                model.forward(&cp.shard(batch, &Default::default())?)?,
            ))
        },
    );
    ranks.unwrap().swap_remove(0)
}

/// The first part of a document as a prompt, the rest token by token.
#[test]
fn tokens_one_by_one_give_the_logits_of_the_whole() {
    let directory = directory("untied");
    let model = directory
        .load::<Flex>(&Default::default(), FloatDType::F32)
        .unwrap();
    let vocab = directory.config().text_config.vocab_size;
    for name in ["untied-mixed", "untied-text"] {
        let document = Case::read(name)
            .documents(directory.processor())
            .swap_remove(0);
        let want = whole(&model, &document, &directory);
        // Media lie before it.
        let cut = document.len() - 9;
        let part = |values: &[i64]| values[..cut].to_vec();
        let prompt = Document::new(
            part(&document.ids),
            vec![IGNORED_LABEL; cut],
            document.positions.clone().map(|axis| part(&axis)),
            document.media.clone(),
            document.pixels.clone(),
        );
        let mut generator = Generator::new(&model, directory.config(), Default::default());
        let mut got = values(generator.prompt(&prompt).unwrap());
        for &id in &document.ids[cut..] {
            got.extend(values(generator.token(id)));
        }
        // The layout may add padding behind.
        let want = &want[..got.len()];
        let largest = want
            .iter()
            .fold(0.0_f32, |largest, value| largest.max(value.abs()));
        for (at, (got, want)) in got.iter().zip(want).enumerate() {
            assert!(
                (got - want).abs() <= 1e-5 * largest,
                "{name}, token {}: {got} {want}",
                at / vocab
            );
        }
    }
}

/// As on devices that compute in half precision; the program chooses f32 on a CPU.
#[test]
fn a_model_in_bf16_gives_nearly_the_same_logits() {
    let directory = directory("untied");
    let case = Case::read("untied-mixed");
    let document = case.documents(directory.processor()).swap_remove(0);
    let logits = |dtype| {
        let model = directory.load::<Flex>(&Default::default(), dtype).unwrap();
        let mut generator = Generator::new(&model, directory.config(), Default::default());
        let mut got = values(generator.prompt(&document).unwrap());
        got.extend(values(generator.token(document.ids[0])));
        got
    };
    let (exact, rounded) = (logits(FloatDType::F32), logits(FloatDType::BF16));
    let norm = |values: &mut dyn Iterator<Item = f32>| {
        values
            .map(|value| f64::from(value).powi(2))
            .sum::<f64>()
            .sqrt()
    };
    let apart = norm(&mut exact.iter().zip(&rounded).map(|(a, b)| a - b));
    let relative = apart / norm(&mut exact.iter().copied());
    // A few roundings of 2⁻⁸ in each of three layers.
    assert!(relative > 1e-4 && relative < 0.05, "{relative}");
}
