//! First values: for a seed they are those that PyTorch draws.

use std::path::Path;

use brigade_nn::{BatchNorm2d, Conv2d, Conv2dOptions, Embedding, Linear, Model};

#[test]
fn weights_of_pytorch_are_what_the_same_seed_draws_here() {
    let small = |p: &brigade_nn::ParamPath<'_>| {
        Conv2d::new(p / "block" / 0, 1, 2, [3, 3], Conv2dOptions::default());
        BatchNorm2d::new(p / "block" / 1, 2);
        Linear::new(p / "head", 4, 3);
        Embedding::new(p / "table", 5, 2);
    };
    tch::manual_seed(0);
    let drawn = Model::builder().device(brigade_test_device::device()).build(small).unwrap();
    for name in ["small.pth", "small_ddp.pth"] {
        let mut model =
            Model::builder().device(brigade_test_device::device()).build(small).unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let report = model.load_weights(path).unwrap();
        assert_eq!((report.loaded, report.is_complete()), (10, true), "{name}");
        for ((name, loaded), (_, drawn)) in model.state_dict().iter().zip(drawn.state_dict()) {
            assert_eq!(loaded, &drawn, "{name}");
        }
    }
}
