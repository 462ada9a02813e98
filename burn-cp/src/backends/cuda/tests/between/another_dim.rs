//! Rows of another dim than the first, wherever their elements stand.

use super::{super::super::in_place::Order, *};

/// How the elements of `[3, rows, 4]` stand in memory: rows of 16 bytes, which the runtime pads none of.
#[derive(Debug, Clone, Copy)]
enum Stands {
    AsWritten,
    /// Row by row, as behind a swap of dims.
    RowsFirst,
    /// The elements of a row apart, which are put together first.
    Apart,
}

/// Rows of the second dim, from ranks whose tensors stand in memory like this.
fn rows_of_another_dim<B>(stand: [Stands; 2]) -> Vec<Vec<Vec<f64>>>
where
    B: CollectiveBackend,
    B::Device: RankDevice,
{
    let mesh = DeviceMesh::new([("cp", 2)]).unwrap();
    let _gpus = gpus();
    launch::threads(2, |rank| {
        let group = comm::bind(&mesh, &rank)?.along(&["cp"])?;
        let device = B::Device::of_rank(&rank)?;
        let me = rank.rank();
        let piece = |source, range| Piece { source, range };
        let pieces = [
            vec![piece(1, 0..1), piece(0, 1..3), piece(1, 2..4)],
            vec![piece(0, 2..3), piece(0, 0..1)],
        ];
        let sizes = [3, 5];
        let plan = Arc::new(ExchangePlan::new(&sizes, &pieces, me).unwrap());
        let rows = sizes[me];
        let values = |shape: [usize; 3]| {
            let num: usize = shape.iter().product();
            let values: Vec<f64> = (0..num).map(|i| (i + 50 * me) as f64).collect();
            Api::<B, 3>::from_data(TensorData::new(values, shape), &device)
        };
        let x = match stand[me] {
            Stands::AsWritten => values([3, rows, 4]),
            Stands::RowsFirst => values([rows, 3, 4]).swap_dims(0, 1),
            Stands::Apart => values([3, 4, rows]).swap_dims(1, 2),
        };
        let sizes: Arc<[usize]> = sizes.into();
        let ops = [
            Collective::Exchange { dim: 1, plan },
            Collective::AllGather { dim: 1, sizes },
        ];
        let run = |op: Collective| {
            let call = Call::forward(&group, "test");
            let x = Payload::Float(x.clone().into_primitive().tensor());
            let Payload::Float(got) = B::collective(x, &op, &group, call) else {
                panic!("a float");
            };
            let got = Api::<B, 3>::from_primitive(TensorPrimitive::Float(got));
            // Computed with, so that its strides are.
            (got + 1.0).into_data().iter::<f64>().collect()
        };
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(ops.map(run).to_vec())
    })
    .unwrap()
}

#[test]
fn rows_of_any_dim_go_from_where_they_are() {
    if !devices_exist(2) {
        return;
    }
    for stand in [
        [Stands::AsWritten; 2],
        [Stands::RowsFirst; 2],
        [Stands::Apart; 2],
        [Stands::RowsFirst, Stands::AsWritten],
        [Stands::AsWritten, Stands::RowsFirst],
    ] {
        let want = rows_of_another_dim::<burn::backend::Flex>(stand);
        assert_eq!(rows_of_another_dim::<Plain>(stand), want, "{stand:?}");
        let fused = rows_of_another_dim::<burn::backend::Cuda<f32, i32>>(stand);
        assert_eq!(fused, want, "fused, {stand:?}");
    }
}

#[test]
fn rows_of_any_dim_are_copied_within_a_gpu() {
    if !device_exists() {
        return;
    }
    let (group, communicator) = (ProcessGroup::solo(), alone(true));
    let run = run(&group, &communicator);
    let piece = |range| Piece { source: 0, range };
    let pieces = [vec![piece(2..4), piece(0..1), piece(1..2)]];
    let plan = Arc::new(ExchangePlan::new(&[5], &pieces, 0).unwrap());
    for stand in [Stands::AsWritten, Stands::RowsFirst, Stands::Apart] {
        let values = |shape: [usize; 3]| {
            let num: usize = shape.iter().product();
            let values: Vec<f32> = (0..num).map(|i| i as f32).collect();
            Api::<Plain, 3>::from_data(TensorData::new(values, shape), &Default::default())
        };
        let x = match stand {
            Stands::AsWritten => values([3, 5, 4]),
            Stands::RowsFirst => values([5, 3, 4]).swap_dims(0, 1),
            Stands::Apart => values([3, 4, 5]).swap_dims(1, 2),
        };
        let stands =
            Order::of(&x.clone().into_primitive().tensor(), 1).map(|order| order.rows_first);
        let want = match stand {
            Stands::AsWritten => Some(false),
            Stands::RowsFirst => Some(true),
            Stands::Apart => None,
        };
        assert_eq!(stands, want, "{stand:?}");
        let rows = |start, len| x.clone().narrow(1, start, len);
        let want = Api::cat(vec![rows(2, 2), rows(0, 1), rows(1, 1)], 1);
        let op = Collective::Exchange {
            dim: 1,
            plan: plan.clone(),
        };
        let x = Payload::Float(x.into_primitive().tensor());
        let Payload::Float(got) = run.collective(x, &op).unwrap() else {
            panic!("a float");
        };
        let got = Api::<Plain, 3>::from_primitive(TensorPrimitive::Float(got));
        assert_eq!(got.dims(), [3, 4, 4]);
        let [got, want] = [got, want].map(|rows| (rows + 1.0).into_data());
        assert_eq!(got, want, "{stand:?}");
    }
}

/// Whose last dim the runtime pads in memory.
#[test]
fn no_rows_at_all_are_exchanged_as_some_are() {
    if !device_exists() {
        return;
    }
    let group = ProcessGroup::solo();
    let plan = Arc::new(ExchangePlan::all_to_all_v(&[vec![0]], 0));
    let sizes: Arc<[usize]> = [0].into();
    let device = Default::default();
    for communicator in both_alone() {
        let run = run(&group, &communicator);
        for (shape, dim) in [
            ([0, 2, 3], 0),
            ([0, 3, 96], 0),
            ([3, 0, 3], 1),
            ([2, 0, 96], 1),
        ] {
            let plan = plan.clone();
            let sizes = sizes.clone();
            for op in [
                Collective::Exchange { dim, plan },
                Collective::AllGather { dim, sizes },
            ] {
                for dtype in [DType::F32, DType::BF16] {
                    let x = Api::<Plain, 3>::empty(shape, (&device, dtype));
                    let x = Payload::Float(x.into_primitive().tensor());
                    let got = run.collective(x, &op).unwrap();
                    assert_eq!(got.shape().to_vec(), shape, "{op:?}, {dtype:?}");
                }
            }
        }
    }
}
