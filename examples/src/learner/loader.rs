//! Packs as a data loader of Burn.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use burn::{
    data::dataloader::{DataLoader, DataLoaderIterator, Progress},
    tensor::backend::Backend,
};
use burn_cp::train::ForRank;

use crate::data::{Pack, PackSource, PatchShape};

/// The packs of one step, and what their pixels are cut into.
#[derive(Debug, Clone)]
pub struct Packs {
    /// Of one length.
    pub packs: Vec<Pack>,
    /// Geometry of the patches.
    pub shape: PatchShape,
}

/// Items of several packs each, made when they are asked for. Each pass over it is an epoch, which continues the packs of the one
/// before unless it is [`repeated`](Self::repeated).
#[derive(Debug, Clone)]
pub struct PackLoader {
    source: Arc<PackSource>,
    /// Items of an epoch.
    num_items: u64,
    /// Those of them that this loader gives.
    given: Range<u64>,
    per_item: usize,
    /// The next pass; `None` where all are alike.
    epoch: Option<Arc<AtomicU64>>,
}

impl PackLoader {
    /// `num_items` of `per_item` packs in each pass.
    #[must_use]
    pub fn new(source: Arc<PackSource>, num_items: u64, per_item: usize) -> Self {
        Self {
            source,
            num_items,
            given: 0..num_items,
            per_item,
            epoch: Some(Arc::default()),
        }
    }

    /// The same, as if `epoch` passes had been made.
    #[must_use]
    pub fn from_epoch(self, epoch: u64) -> Self {
        Self {
            epoch: Some(Arc::new(AtomicU64::new(epoch))),
            ..self
        }
    }

    /// The same packs in every pass.
    #[must_use]
    pub fn repeated(self) -> Self {
        Self {
            epoch: None,
            ..self
        }
    }

    /// The items of one pass.
    pub fn items(&self) -> impl Iterator<Item = Packs> + '_ {
        let epoch = self.epoch.as_ref();
        let epoch = epoch.map_or(0, |epoch| epoch.fetch_add(1, Ordering::Relaxed));
        let first = epoch * self.num_items;
        let per_item = self.per_item as u64;
        self.given.clone().map(move |item| {
            let pack = (first + item) * per_item;
            Packs {
                packs: (pack..pack + per_item)
                    .map(|index| self.source.pack(index))
                    .collect(),
                shape: *self.source.shape(),
            }
        })
    }

    fn num_given(&self) -> usize {
        (self.given.end - self.given.start) as usize
    }
}

struct Pass<I> {
    items: I,
    progress: Progress,
}

impl<I: Iterator<Item = Packs>> Iterator for Pass<I> {
    type Item = ForRank<Packs>;

    fn next(&mut self) -> Option<Self::Item> {
        let item = self.items.next()?;
        self.progress.items_processed += 1;
        Some(ForRank::new(item))
    }
}

impl<I: Iterator<Item = Packs>> DataLoaderIterator<ForRank<Packs>> for Pass<I> {
    fn progress(&self) -> Progress {
        self.progress.clone()
    }
}

impl<B: Backend> DataLoader<B, ForRank<Packs>> for PackLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<ForRank<Packs>> + 'a> {
        Box::new(Pass {
            items: self.items(),
            progress: Progress::new(0, self.num_given()),
        })
    }

    fn num_items(&self) -> usize {
        self.num_given()
    }

    /// Packs are host data.
    fn to_device(&self, _: &B::Device) -> Arc<dyn DataLoader<B, ForRank<Packs>>> {
        Arc::new(self.clone())
    }

    /// Counts its passes apart from this one's.
    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<B, ForRank<Packs>>> {
        let at = |item: usize| (self.given.start + item as u64).min(self.given.end);
        let epoch = self.epoch.as_ref().map(|epoch| {
            let epoch = epoch.load(Ordering::Relaxed);
            Arc::new(AtomicU64::new(epoch))
        });
        Arc::new(Self {
            given: at(start)..at(end).max(at(start)),
            epoch,
            ..self.clone()
        })
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;

    use super::*;
    use crate::train::TrainConfig;

    fn ids(loader: &dyn DataLoader<Flex, ForRank<Packs>>) -> Vec<Vec<i64>> {
        let packs = loader.iter().flat_map(|item| item.item().packs.clone());
        packs.map(|pack| pack.ids).collect()
    }

    #[test]
    fn slices_give_the_items_of_each_pass_between_them() {
        let source = <TrainConfig>::default().packs(crate::data::Split::Train);
        let whole = PackLoader::new(Arc::new(source.unwrap()), 5, 2);
        let slice = |start, end| DataLoader::<Flex, _>::slice(&whole, start, end);
        let slices = [slice(0, 2), slice(2, 9)];
        assert_eq!([slices[0].num_items(), slices[1].num_items()], [2, 3]);
        let mut passes = Vec::new();
        for _ in 0..2 {
            let given = slices.each_ref().map(|slice| ids(slice.as_ref())).concat();
            assert_eq!(given, ids(&whole));
            passes.push(given);
        }
        assert_ne!(passes[0], passes[1]);
    }
}
