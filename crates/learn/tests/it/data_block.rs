//! Data blocks as a program uses them: items, labels, splits, transforms, codecs, summaries.

use std::fs;
use std::path::{Path, PathBuf};

use brigade_data::DataLoader;
use brigade_learn::data::*;
use brigade_learn::{Item, Learner, Loaders, Predictor};
use brigade_nn::{Flatten, Linear, ParamPath, Sequential};
use brigade_testkit::Photos;
use brigade_train::Accelerator;
use brigade_vision::transforms::{Operation, Phase, RandomCrop, SampleRng, Transform};
use brigade_vision::{CacheOptions, ImageError, OnBroken, Size};
use tch::{Kind, Tensor};

fn accelerator() -> Accelerator {
    Accelerator::builder().cpu(true).quiet(true).build().unwrap()
}

/// `train/CLASS/0000.jpg` and so on, and `val/CLASS/…`.
fn photos(classes: usize, per_class: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    Photos::new(classes, per_class).size(60, 45).write(folder.path()).unwrap();
    folder
}

/// Empty files.
fn files(names: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        let file = folder.path().join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, []).unwrap();
    }
    folder
}

fn woofs() -> DataBlock {
    DataBlock::new(images(), categories())
        .items(image_files)
        .label(parent_name)
        .split(grandparent("train", "val"))
        .item_transforms((RandomResizedCrop::new(32), Flip::new(0.5)))
        .batch_transforms(Normalize::imagenet())
}

fn message(block: &DataBlock, path: &Path) -> String {
    block.loaders(&accelerator(), path, 2).unwrap_err().to_string()
}

fn rows(target: Option<Tensor>) -> Vec<f64> {
    Vec::try_from(target.unwrap().to_kind(Kind::Double).contiguous().view([-1])).unwrap()
}

#[test]
fn the_program_of_the_documentation_gives_batches() {
    let folder = photos(3, 10);
    let data = woofs().seed(1).loaders(&accelerator(), folder.path(), 8).unwrap();
    assert_eq!(data.class_names().unwrap(), ["disc", "square", "triangle"]);
    // The 30 training items leave out an incomplete batch of 6; all 6 validation items are used.
    assert_eq!((data.train_batches(), data.valid_batches()), (3, 1));
    let (inputs, target) = data.one_batch(8).unwrap();
    assert_eq!((inputs[0].size(), inputs[0].kind()), (vec![8, 3, 32, 32], Kind::Float));
    // Normalised: values of 0 to 1 would have a mean of about 0.45.
    assert!(inputs[0].min().double_value(&[]) < -0.5);
    let target = target.unwrap();
    assert_eq!((target.size(), target.kind()), (vec![8], Kind::Int64));
    let (_, target) = data.one_valid_batch(64).unwrap();
    assert_eq!(rows(target), [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]);

    let shown = data.show_batch(5).unwrap();
    assert_eq!(shown.len(), 5);
    assert!(shown.iter().all(|(picture, label)| {
        (picture.width, picture.height, picture.rgb.len()) == (32, 32, 32 * 32 * 3)
            && data.class_names().unwrap().contains(label)
    }));
    // Showing a batch does not change the position in training, and the same seed gives the same batches.
    assert_eq!(data.show_batch(5).unwrap(), shown);
    let again = woofs().seed(1).threads(0).loaders(&accelerator(), folder.path(), 8).unwrap();
    assert_eq!(again.show_batch(5).unwrap(), shown);
}

#[test]
fn transforms_run_in_fastais_order_unless_the_list_counts() {
    let folder = photos(2, 2);
    let steps = |block: DataBlock| -> Vec<String> {
        let summary = block.summary(folder.path());
        assert_eq!(summary.failed(), None, "{summary}");
        let names = summary.steps.iter().map(|step| step.name.clone());
        names.filter(|name| name.starts_with("Flip") || name.starts_with("RandomResized")).collect()
    };
    let first = |steps: &[String]| steps[0].split('(').next().unwrap().to_owned();
    let sorted = steps(woofs());
    assert_eq!((first(&sorted).as_str(), sorted.len()), ("Flip", 2));
    assert_eq!(first(&steps(woofs().in_given_order())), "RandomResizedCrop");
}

#[test]
fn the_vocabulary_is_that_of_training() {
    let folder =
        files(&["train/b/1.jpg", "train/a/2.jpg", "train/a/3.jpg", "val/z/4.jpg", "val/a/5.jpg"]);
    let path = folder.path();
    let block = |target: CategoryBlock| {
        DataBlock::new(images(), target).label(parent_name).split(grandparent("train", "val"))
    };
    let error = message(&block(categories()), path);
    assert!(error.contains("the label \"z\" of ") && error.contains("val/z/4.jpg"), "{error}");
    assert!(
        error.contains("not in the training set, whose classes are a, b; put an item"),
        "{error}"
    );
    let data = |target| block(target).loaders(&accelerator(), path, 1).unwrap();
    let names = |data: &Loaders| data.class_names().unwrap().to_vec();
    assert_eq!(names(&data(categories().unknown(true))), ["#na#", "a", "b"]);
    assert_eq!(names(&data(categories().vocabulary(["z", "b", "a"]))), ["z", "b", "a"]);
    assert_eq!(names(&data(categories().sorted(false).unknown(true))), ["#na#", "a", "b"]);
    let error = message(&block(categories().vocabulary(["a", "b"])), path);
    assert!(error.contains("is not in the vocabulary that was given: a, b"), "{error}");
}

#[test]
fn what_cannot_be_trained_with_is_refused_with_advice() {
    let folder = files(&["train/a/1.jpg", "train/a/2.jpg", "valid/a/3.jpg", "valid/b/4.jpg"]);
    let path = folder.path();
    let error = message(&woofs(), path);
    assert!(
        error
            .contains("named val; the folders above those of the items are [\"train\", \"valid\"]"),
        "{error}"
    );
    let error = message(&woofs().split(grandparent("train", "valid")), path);
    assert!(error.contains("the training set (2 items) has the single label \"a\""), "{error}");
    let random = woofs().split(random_split(0.2));
    let error = message(&random, path);
    assert!(error.contains("none of 4 items to validate with"), "{error}");
    let error = message(&woofs().split(index_split(0..4)), path);
    assert!(error.contains("none of 4 items to train with"), "{error}");
    let error = message(&woofs().split(no_split()).label(|_: &Path| None::<String>), path);
    assert!(error.contains("train/a/1.jpg has no label: the labeller found none"), "{error}");
    let block = DataBlock::new(images(), categories()).split(no_split());
    assert!(message(&block, path).contains("no labeller; say how labels are found"));
    let error = message(&woofs().split(no_split()).label(|_: &Path| 1.0), path);
    assert!(error.contains("gives numbers for ") && error.contains("expects one class"), "{error}");
    let error = block.label(parent_name).loaders(&accelerator(), path, 64);
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("too few for a batch of 64: 4 training items; make the batch smaller"),
        "{error}"
    );
    let empty = tempfile::tempdir().unwrap();
    assert!(message(&woofs(), empty.path()).contains("there are no images below"));
    let error = message(&woofs(), Path::new("/no/such/folder"));
    assert!(error.starts_with("cannot read /no/such/folder"), "{error}");
    let error = message(&woofs().items(Files::images().folders(["dev"])), path);
    assert!(error.contains("the folders with files are [\"train\", \"valid\"]"), "{error}");
}

#[test]
fn tables_give_several_classes_and_numbers() {
    let folder = photos(2, 3);
    let path = folder.path();
    let rows_of = "id,tags,x,y,is_valid\n\
        disc/0000,round red,1,2,False\ndisc/0001,,3.5,4,False\n\
        square/0000,red,5,6,True\nsquare/0001,round;red,7,8,False\n";
    fs::write(path.join("labels.csv"), rows_of.replace(';', " ")).unwrap();
    let items = csv("labels.csv").file_column("id").folder("train").suffix(".jpg");
    let table = DataBlock::new(images(), multi_categories())
        .items(items.clone())
        .label(column("tags").separator(" "))
        .split(column_split("is_valid"))
        .item_transforms(Resize::new(16));
    let data = table.seed(2).loaders(&accelerator(), path, 3).unwrap();
    assert_eq!(data.class_names().unwrap(), ["red", "round"]);
    let (_, target) = data.one_valid_batch(8).unwrap();
    assert_eq!(rows(target), [1.0, 0.0]);
    let (_, target) = data.one_batch(3).unwrap();
    let mut sums: Vec<f64> = rows(target).chunks(2).map(|row| row[0] + row[1]).collect();
    sums.sort_by(f64::total_cmp);
    assert_eq!(sums, [0.0, 2.0, 2.0]);
    let mut labels: Vec<String> =
        data.show_batch(3).unwrap().into_iter().map(|(_, label)| label).collect();
    labels.sort();
    assert_eq!(labels, ["", "red;round", "red;round"]);

    let regression = |columns: Column| {
        DataBlock::new(images(), numbers())
            .items(items.clone())
            .label(columns)
            .split(column_values_split("x", [5]))
            .item_transforms(Resize::new(16))
    };
    let data = regression(columns(["x", "y"])).loaders(&accelerator(), path, 3).unwrap();
    let (_, target) = data.one_valid_batch(1).unwrap();
    assert_eq!(target.as_ref().unwrap().size(), [1, 2]);
    assert_eq!(rows(target), [5.0, 6.0]);
    let data = regression(column("y")).loaders(&accelerator(), path, 3).unwrap();
    assert_eq!(data.class_names(), None);
    assert_eq!(data.one_valid_batch(1).unwrap().1.unwrap().size(), [1]);
    let error = message(&regression(column("tags")), path);
    assert!(error.contains("has \"round red\" as its target, expected a number"), "{error}");
    let error = message(&regression(column("z")), path);
    assert!(error.contains("has no column \"z\"; its columns are [\"id\", \"tags\""), "{error}");
    let error = message(&regression(column("y")).items(csv("labels.csv")), path);
    assert!(
        error.contains(" names files that are not there, 4 of 4, ")
            && error.contains("set .folder("),
        "{error}"
    );
    let error = message(&woofs().label(column("y")), path);
    assert!(error.contains("the items are files without a table"), "{error}");
}

#[test]
fn splitters_divide_by_their_rule() {
    let folder = files(&["list.txt"]);
    fs::write(folder.path().join("list.txt"), "3.jpg\n1.jpg\n").unwrap();
    let items = Items::new(folder.path(), (0..10).map(|n| format!("{n}.jpg")));
    let parts = |splitter: Splitter| {
        let split = splitter.split(&items, &|| Ok(Vec::new()), 3).unwrap();
        (split.train.len(), split.valid)
    };
    assert_eq!(parts(index_split([7, 2])), (8, vec![2, 7]));
    assert_eq!(parts(mask_split((0..10).map(|n| n > 7))), (8, vec![8, 9]));
    assert_eq!(parts(end_split(0.3)), (7, vec![7, 8, 9]));
    assert_eq!(parts(file_split("list.txt")), (8, vec![1, 3]));
    assert_eq!(parts(function_split(|path| path.ends_with("4.jpg"))), (9, vec![4]));
    assert_eq!(parts(no_split()), (10, vec![]));
    let (train, valid) = parts(random_split(0.2));
    assert_eq!((train, valid.len()), (8, 2));
    assert_eq!(parts(random_split(0.2)).1, valid);
    assert_eq!(parts(random_split(0.2).seed(3)).1, valid);
    assert!((4..40).any(|seed| parts(random_split(0.2).seed(seed)).1 != valid));
    let split = subset_split(0.5, 0.2).split(&items, &|| Ok(Vec::new()), 3).unwrap();
    assert_eq!((split.train.len(), split.valid.len()), (5, 2));
    assert!(split.valid.iter().all(|index| !split.train.contains(index)));
    for refused in [end_split(1.0), end_split(0.0), subset_split(0.9, 0.2), mask_split([true])] {
        assert!(refused.split(&items, &|| Ok(Vec::new()), 0).is_err());
    }
    assert!(subset_split(0.8, 0.2).split(&items, &|| Ok(Vec::new()), 0).is_ok());
}

#[test]
fn a_codec_reads_as_validation_does_and_can_be_written_down() {
    let folder = photos(2, 5);
    let data = woofs()
        .batch_transforms((
            aug_transforms().size(24),
            saturation(0.2),
            hue(0.1),
            Normalize::imagenet(),
            random_erasing(1.0),
        ))
        .loaders(&accelerator(), folder.path(), 4)
        .unwrap();
    let (inputs, target) = data.one_valid_batch(1).unwrap();
    assert_eq!(inputs[0].size(), [1, 3, 24, 24]);
    let file = folder.path().join("val/disc/0000.jpg");
    let codec = data.item_codec().unwrap();
    let (kind, settings) = codec.describe().unwrap();
    let text = serde_json::to_string(&settings).unwrap();
    let restored = codec_from(kind, &serde_json::from_str(&text).unwrap()).unwrap();
    for codec in [codec, &restored] {
        for item in [Item::File(file.clone()), Item::Bytes(fs::read(&file).unwrap())] {
            assert_eq!(codec.encode(&item).unwrap(), inputs);
        }
        let (picture, label) =
            codec.show(&inputs, target.as_ref(), 0, data.class_names()).unwrap().unwrap();
        assert_eq!((picture.width, picture.height, label.as_str()), (24, 24, "disc"));
    }
    let one = Item::Tensors(vec![inputs[0].get(0)]);
    assert_eq!(codec.encode(&one).unwrap(), inputs);
    assert!(codec.encode(&Item::Bytes(b"no image".to_vec())).is_err());
    assert!(codec.picture(&inputs, 1).is_err());
    let error = codec_from("text", &settings).unwrap_err().to_string();
    assert!(error.contains("no codec of the kind \"text\""), "{error}");
}

#[test]
fn pictures_undo_the_normalisation() {
    let folder = photos(2, 5);
    let block = |grey: bool| {
        let images = if grey { grey_images() } else { images() };
        DataBlock::new(images, categories())
            .label(parent_name)
            .split(grandparent("train", "val"))
            .item_transforms(Resize::new(20))
    };
    let picture = |block: DataBlock| {
        let data = block.loaders(&accelerator(), folder.path(), 4).unwrap();
        let (inputs, _) = data.one_valid_batch(2).unwrap();
        (data.item_codec().unwrap().picture(&inputs, 1).unwrap().unwrap(), inputs[0].size())
    };
    let (plain, size) = picture(block(false));
    assert_eq!(size, [2, 3, 20, 20]);
    for normalize in
        [Normalize::imagenet(), Normalize::from_batch(), Normalize::new([0.5; 3], [0.1; 3])]
    {
        assert_eq!(picture(block(false).batch_transforms(normalize)).0, plain);
    }
    let (grey, size) = picture(block(true));
    assert_eq!(size, [2, 1, 20, 20]);
    assert!(grey.rgb.chunks(3).all(|pixel| pixel[0] == pixel[1] && pixel[1] == pixel[2]));
    assert_eq!(picture(block(true).batch_transforms(Normalize::from_batch())).0, grey);
    // Erased pixels are not part of the statistics.
    let statistics = |transforms: Vec<BatchTransform>| {
        let block = block(false).seed(4).batch_transforms(transforms);
        let data = block.loaders(&accelerator(), folder.path(), 4).unwrap();
        data.item_codec().unwrap().describe().unwrap().1["normalize"].clone()
    };
    let erased = (Normalize::from_batch(), random_erasing(1.0)).parts();
    assert!(statistics(Normalize::from_batch().parts())["mean"].is_array());
    assert_eq!(statistics(erased), statistics(Normalize::from_batch().parts()));
    // The first batch's statistics normalise it.
    let data = block(false).seed(4).batch_transforms(Normalize::from_batch());
    let data = data.split(no_split()).loaders(&accelerator(), folder.path(), 10).unwrap();
    let (inputs, _) = data.one_batch(10).unwrap();
    let dims: &[i64] = &[0, 2, 3];
    let mean = inputs[0].mean_dim(dims, false, Kind::Float).abs().max().double_value(&[]);
    let std = inputs[0].std_dim(dims, true, false);
    assert!(mean < 1e-4 && (std - 1.0).abs().max().double_value(&[]) < 1e-3, "{mean}");
}

/// Darkens every image.
#[derive(Clone, Debug)]
struct Dusk;

impl Transform for Dusk {
    fn draw(
        &self,
        _: Size,
        _: Phase,
        _: &mut SampleRng,
        operations: &mut Vec<Operation>,
    ) -> Result<(), ImageError> {
        operations.push(Operation::Brightness(0.1));
        Ok(())
    }
}

#[test]
fn transforms_of_the_program_run_and_are_not_written_down() {
    let folder = photos(2, 5);
    let codec = |block: DataBlock| {
        let data = block.loaders(&accelerator(), folder.path(), 4).unwrap();
        let (inputs, _) = data.one_valid_batch(2).unwrap();
        let error = data.item_codec().unwrap().describe().unwrap_err().to_string();
        (inputs[0].max().double_value(&[]), error)
    };
    let plain = woofs().batch_transforms(());
    let own = plain.clone().item_transforms((Resize::new(16), ItemTransform::own(Dusk, 2)));
    let (brightest, error) = codec(own);
    assert!(brightest < 0.11, "{brightest}");
    assert!(error.contains("the item transform Dusk is defined by the program"), "{error}");
    let minus = BatchTransform::function(|images| Ok(images.f_neg()?));
    let (brightest, error) = codec(plain.batch_transforms(minus));
    assert!(brightest <= 0.0, "{brightest}");
    assert!(error.contains("a function among the batch transforms cannot be exported"), "{error}");
}

#[test]
fn a_summary_names_the_step_that_fails_and_its_item() {
    let folder = photos(2, 5);
    let path = folder.path();
    let summary = woofs().summary(path);
    assert_eq!(summary.failed(), None);
    let text = summary.to_string();
    for part in [
        "items: 12 below ",
        "split: 10 to train with, 2 to validate with",
        "targets: class 0 of 2 classes: disc, square",
        "decode: image of 60 x 45 pixels, ",
        "image of 32 x 32 pixels, ",
        "batch of 4: images Uint8 [4, 3, 32, 32], ",
        "targets Int64 [4], 0.0000 to 0.0000",
        "batch transforms: images Float [4, 3, 32, 32], -",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let fails = |block: &DataBlock, step: &str, reason: &str| {
        let summary = block.summary(path);
        let failed = summary.failed().unwrap();
        assert_eq!(failed.name, step);
        assert!(failed.result.as_ref().unwrap_err().contains(reason), "{summary}");
    };
    fails(&woofs().items(file_list(["1.jpg"])), "items", "1.jpg");
    let hostile = woofs().label(|_: &Path| "\x1b[2J\n".to_owned()).summary(path).to_string();
    assert!(hostile.contains(r"\u{1b}[2J\n") && !hostile.contains('\x1b'), "{hostile:?}");
    fails(&woofs().split(grandparent("a", "b")), "split", "named a");
    fails(&woofs().label(name_regex("(")), "labels", "`(` cannot find labels");
    fails(&woofs().label(|_: &Path| 1.0), "targets", "expects one class");
    let crop = RandomCrop::new(100);
    fails(
        &woofs().item_transforms(crop),
        "RandomCrop(RandomCrop { size: Size { width: 100, height: 100 }, padding: 0, pad_if_needed: false, mode: Constant([0, 0, 0]), over_edges: false })",
        "train/disc/0000.jpg",
    );
    // Images of several sizes cannot be one batch.
    fs::write(path.join("train/disc/0001.jpg"), Photos::new(2, 5).size(50, 45).jpeg(0, 1)).unwrap();
    fails(
        &woofs().item_transforms(()),
        "batch of 4",
        "0001.jpg has 50 x 45 pixels after the transforms",
    );
    fs::write(path.join("train/disc/0000.jpg"), b"text").unwrap();
    fails(&woofs(), "decode", "train/disc/0000.jpg");
}

#[test]
fn broken_images_are_an_error_or_replaced_with_their_targets() {
    let folder = photos(2, 5);
    let path = folder.path();
    fs::write(path.join("val/disc/0005.jpg"), b"text").unwrap();
    let number = |path: &Path| if path.to_string_lossy().contains("square") { 7.0 } else { 3.0 };
    let block = DataBlock::new(images(), numbers())
        .label(number)
        .split(function_split(|path: &Path| path.to_string_lossy().contains("/val/")))
        .item_transforms(Resize::new(16));
    fs::rename(path.join("val/disc/0000.jpg"), path.join("val/disc/0006.jpg")).unwrap();
    let data = |block: DataBlock| block.loaders(&accelerator(), path, 2).unwrap();
    let error = data(block.clone()).one_valid_batch(3).unwrap_err().to_string();
    assert!(error.contains("val/disc/0005.jpg"), "{error}");
    fs::remove_file(path.join("val/disc/0006.jpg")).unwrap();
    // The next image that can be read is a square.
    let skipping = data(block.on_broken(OnBroken::Skip));
    assert_eq!(rows(skipping.one_valid_batch(2).unwrap().1), [7.0, 7.0]);
}

#[test]
fn a_cache_changes_no_batch() {
    let (folder, cache) = (photos(2, 5), tempfile::tempdir().unwrap());
    let block = DataBlock::new(images(), categories())
        .label(parent_name)
        .seed(3)
        .item_transforms((Resize::squish(24), Flip::new(0.5)))
        .in_given_order();
    let shown = |block: &DataBlock| {
        let data = block.loaders(&accelerator(), folder.path(), 4).unwrap();
        [data.show_batch(4).unwrap(), data.show_batch(4).unwrap()]
    };
    let plain = shown(&block);
    let cached = block.cache(CacheOptions::new(cache.path()));
    assert_eq!(shown(&cached), plain);
    assert!(fs::read_dir(cache.path()).unwrap().count() > 0);
    assert_eq!(shown(&cached), plain);
}

#[test]
fn ready_made_loaders_follow_their_rule() {
    let folder = photos(2, 5);
    let path = folder.path();
    let accelerator = accelerator();
    let make = |loaders: ImageLoaders| {
        let loaders = loaders.item_transforms(Resize::new(16)).drop_last(false);
        let data = loaders.loaders(&accelerator, 4).unwrap();
        let (train, valid) = (data.train_batches(), data.valid_batches());
        (data.class_names().unwrap().join(" "), train, valid)
    };
    let classes = || "disc square".to_owned();
    assert_eq!(make(ImageLoaders::from_folder(path)), (classes(), 3, 1));
    let by_path = ImageLoaders::from_path_regex(path.join("train"), "/([a-z]+)/[0-9]+[.]jpg$");
    assert_eq!(make(by_path), (classes(), 2, 1));
    let even = ImageLoaders::from_name(path, |name: &str| {
        name.trim_end_matches(".jpg").ends_with(['0', '2', '4'])
    });
    assert_eq!(make(even.seed(0)).0, "false true");
    let by_name =
        ImageLoaders::from_name_regex(path, "([0-9])[.]jpg$").target(categories().unknown(true));
    assert!(make(by_name.seed(0)).0.starts_with("#na# 0"));
    let lists = ImageLoaders::from_lists(
        path,
        ["train/disc/0000.jpg", "train/disc/0001.jpg", "val/square/0000.jpg"].map(PathBuf::from),
        ["b", "a", "a"],
    );
    assert_eq!(make(lists.split(index_split([2]))), ("a b".to_owned(), 1, 1));
    fs::write(path.join("labels.csv"), "name,kind\n0000.jpg,x\n0001.jpg,y z\n0002.jpg,z\n")
        .unwrap();
    let table = ImageLoaders::from_csv(path, csv("labels.csv").folder("train/disc"))
        .split(index_split([2]));
    assert_eq!(make(table.label_separator("kind", " ")), ("x y z".to_owned(), 1, 1));
}

#[test]
fn a_learner_trains_predicts_and_is_read_again_without_the_data() {
    let folder = photos(2, 10);
    let accelerator = accelerator();
    accelerator.set_seed(1);
    let data = woofs().seed(1).loaders(&accelerator, folder.path(), 5).unwrap();
    let codec = std::sync::Arc::clone(data.item_codec().unwrap());
    let model = |path: &ParamPath<'_>| {
        Sequential::new().add(Flatten).add(Linear::new(path / 1, 3 * 32 * 32, 2))
    };
    let mut learner = Learner::new(&accelerator, data, model).unwrap().quiet(true);
    learner.fit_one_cycle(1, 1e-3, ()).unwrap();
    // Four items of validation, in their order; the same files without labels give the same result.
    let predictions = learner.predictions().unwrap();
    assert_eq!(predictions.predictions.size(), [4, 2]);
    assert_eq!(rows(predictions.targets), [0.0, 0.0, 1.0, 1.0]);
    let names = ["disc/0000.jpg", "disc/0001.jpg", "square/0000.jpg", "square/0001.jpg"];
    let files = names.map(|name| folder.path().join("val").join(name));
    let unlabelled = DataLoader::new(Unlabelled::new(&codec, files.clone())).batch_size(3);
    let again = learner.predictions_of(unlabelled).unwrap();
    assert!(again.targets.is_none());
    assert!(predictions.predictions.allclose(&again.predictions, 1e-5, 1e-5, false));
    assert_eq!(learner.tta(2, 0.25).unwrap().predictions.size(), [4, 2]);

    let file = folder.path().join("model.pth");
    learner.export(&file).unwrap();
    let mut predictor = Predictor::load::<Tensor, _>(&accelerator, &file, model).unwrap();
    for (row, path) in files.into_iter().enumerate() {
        let prediction = predictor.predict(path.clone()).unwrap();
        let expected = predictions.predictions.get(row as i64);
        assert!(prediction.probabilities.allclose(&expected, 1e-5, 1e-5, false));
        let bytes = fs::read(&path).unwrap();
        assert_eq!(predictor.predict(bytes).unwrap().class, prediction.class);
        assert!(["disc", "square"].contains(&prediction.class.unwrap().as_str()));
    }
}
