//! `#[derive(Batch)]` in a program that imports the prelude and nothing else of Brigade.

use brigade::data::dataset_from_fn;
use brigade::prelude::*;

#[derive(Batch, Debug)]
struct Pair<X, Y> {
    x: X,
    y: Y,
}

/// Type parameters with the names of the macro's own, and a constant.
#[derive(Batch, Debug)]
struct Crops<E, const N: usize>([E; N], Option<E>);

fn row(values: &[i64]) -> Tensor {
    Tensor::from_slice(values)
}

#[test]
fn a_loader_takes_structs() -> Result<()> {
    let data = dataset_from_fn(5, |index, _| Ok(Pair { x: [index as f32; 3], y: index as i64 }));
    let sizes: Vec<_> = DataLoader::new(data)
        .batch_size(2)
        .iter()
        .map(|batch| batch.map(|batch| (batch.x.size(), batch.y.size())))
        .collect::<Result<_, _>>()?;
    assert_eq!(sizes, [(vec![2, 3], vec![2]), (vec![2, 3], vec![2]), (vec![1, 3], vec![1])]);
    Ok(())
}

#[test]
fn a_struct_is_a_tree_of_tensors() {
    let pair = Pair { x: vec![row(&[1, 2, 3]), row(&[4, 5, 6])], y: row(&[7, 8, 9]) };
    assert_eq!(pair.rows().unwrap(), 3);
    assert_eq!(pair.spec().to_string(), "([tensor, tensor], tensor)");
    let parts = pair.split_rows(2).unwrap();
    assert_eq!(parts[1].y, row(&[9]));
    let joined = TensorTree::concat_rows(&[&parts[1], &parts[0]]).unwrap();
    assert_eq!((&joined.x[1], &joined.y), (&row(&[6, 4, 5]), &row(&[9, 7, 8])));
    let moved = pair.to_device(Device::Cpu).unwrap();
    assert_eq!(moved.x[0].data_ptr(), pair.x[0].data_ptr());
    // A struct of references is gathered like one of tensors.
    let borrowed = Pair { x: &pair.y, y: &pair.y };
    assert_eq!(borrowed.narrow_rows(0..1).unwrap().x, row(&[7]));
}

#[test]
fn lists_of_a_parameter_are_collated_where_they_are_tensors() {
    let crops = |start: i64| Crops([row(&[start]), row(&[start + 1])], None);
    let batch = brigade::data::Collate::collate(&[&crops(1), &crops(5)]).unwrap();
    assert_eq!(batch.0, [row(&[1, 5]).reshape([2, 1]), row(&[2, 6]).reshape([2, 1])]);
    assert!(batch.1.is_none());
}
