//! What an order keeps alive.

use burn::{
    backend::{Autodiff, Flex},
    tensor::Tensor,
};

use crate::{
    collectives,
    comm::{self, CommError, ProgramOrder},
    launch,
    mesh::DeviceMesh,
};

#[test]
fn an_abandoned_forward_pass_does_not_keep_its_order_alive() {
    let mesh = DeviceMesh::new([("cp", 2)]).unwrap();
    launch::threads(2, |rank| {
        let group = comm::bind(&mesh, &rank)?.along(&["cp"])?;
        let order = ProgramOrder::new();
        let ended = order.downgrade();
        let own = group.with_order(order);
        let x = Tensor::<Autodiff<Flex>, 1>::ones([2], &Default::default()).require_grad();
        let y = collectives::all_reduce(x * 2.0, &own);
        let z = collectives::all_gather(y, 0, &own);
        assert!(ended.upgrade().is_some());
        drop((z, own));
        // Burn still holds the operations' steps; they must not hold the order, which holds the graph.
        assert!(ended.upgrade().is_none());
        Ok::<_, CommError>(())
    })
    .unwrap();
}
