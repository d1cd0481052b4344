//! The book, as mdBook reads it, and a test of it: compiles and runs the Rust examples of its pages and of the READMEs.

macro_rules! pages {
    ($($name:ident $file:literal)*) => {
        $(#[cfg(doctest)]
        #[doc = include_str!($file)]
        pub struct $name;)*
    };
}

pages! {
    Checkpoints "checkpoints.md"
    ConceptOfExperts "concepts/experts.md"
    ConceptOfPipelines "concepts/pipelines.md"
    ConceptOfSharding "concepts/sharding.md"
    ConceptOfTensorRanks "concepts/tensor-and-context.md"
    Events "events.md"
    Extending "extending.md"
    FromAccelerate "from-accelerate.md"
    FromTch "from-tch.md"
    FromTorchrun "from-torchrun.md"
    Gpus "gpus.md"
    Images "images.md"
    Inference "inference.md"
    LargeModels "large-models.md"
    Learner "learner.md"
    Metrics "metrics.md"
    Notebooks "notebooks.md"
    OneToMany "one-to-many.md"
    OwnProject "own-project.md"
    PrecisionAndSpeed "precision-and-speed.md"
    Text "text.md"
    Watching "watching.md"
    Readme "../README.md"
    ReadmeOfTheLibrary "../crates/brigade/README.md"
}
