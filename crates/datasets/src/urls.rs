//! Addresses and checksums of the archives that fastai offers.
//!
//! Source: `fastai/data/external.py` and `fastai/data/download_checks.py` of fastai 2.8.12.

/// Addresses of the archives that fastai offers, under fastai's names.
///
/// ```
/// use brigade_datasets::Urls;
///
/// assert!(Urls::IMAGEWOOF_320.ends_with("/imagewoof2-320.tgz"));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Urls;

/// An archive's row in fastai's table of checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Published {
    pub(crate) url: &'static str,
    pub(crate) bytes: u64,
    /// MD5 of the first mebibyte alone.
    pub(crate) md5_of_start: &'static str,
}

/// Returns the row of an address in fastai's table.
pub(crate) fn published(url: &str) -> Option<&'static Published> {
    PUBLISHED.iter().find(|row| row.url == url)
}

/// Returns `true` if fastai unpacks archives of this address into its folder of models.
pub(crate) fn is_model(url: &str) -> bool {
    url.starts_with("https://s3.amazonaws.com/fast-ai-modelzoo/")
}

macro_rules! urls {
    ($($(#[$doc:meta])* $name:ident = $url:literal $(, $bytes:literal, $md5:literal)?;)*) => {
        impl Urls {
            $($(#[$doc])* pub const $name: &'static str = $url;)*
        }

        const PUBLISHED: &[Published] = &[$($(
            Published { url: $url, bytes: $bytes, md5_of_start: $md5 },
        )?)*];
    };
}

urls! {
    /// Census data: who earns more than 50,000 dollars a year, in a CSV file. 968 kB.
    ADULT_SAMPLE = "https://s3.amazonaws.com/fast-ai-sample/adult_sample.tgz", 968_212, "64eb9d7e23732de0b138f7372d15492f";
    /// A part of the Biwi head poses, with the centres of the heads. 594 kB.
    BIWI_SAMPLE = "https://s3.amazonaws.com/fast-ai-sample/biwi_sample.tgz", 593_774, "9179f4c1435f4b291f0d5b072d60c2c9";
    /// CIFAR-10: ten classes of images of 32x32. 168 MB.
    CIFAR = "https://s3.amazonaws.com/fast-ai-sample/cifar10.tgz", 168_168_549, "a5f8c31371b63a406b23368042812d3c";
    /// A part of COCO: images with boxes. 3.2 GB.
    COCO_SAMPLE = "https://s3.amazonaws.com/fast-ai-coco/coco_sample.tgz", 3_245_877_008, "006cd55d633d94b36ecaf661467830ec";
    /// A few images of COCO, with boxes. 801 kB.
    COCO_TINY = "https://s3.amazonaws.com/fast-ai-coco/coco_tiny.tgz", 801_038, "367467451ac4fba79a647753c2c66d3a";
    /// Numbers in English words, one a line. 30 kB.
    HUMAN_NUMBERS = "https://s3.amazonaws.com/fast-ai-sample/human_numbers.tgz", 30_252, "8a19c3bfa2bcb08cd787e741261f3ea2";
    /// Reviews of films: positive, negative and without a label. 144 MB.
    IMDB = "https://s3.amazonaws.com/fast-ai-nlp/imdb.tgz", 144_440_600, "90f9b1c4ff43a90d67553c9240dc0249";
    /// A thousand reviews of films, in a CSV file. 572 kB.
    IMDB_SAMPLE = "https://s3.amazonaws.com/fast-ai-sample/imdb_sample.tgz", 571_827, "0842e61a9867caa2e6fbdb14fa703d61";
    /// A part of the MovieLens ratings, in a CSV file. 52 kB.
    ML_SAMPLE = "https://s3.amazonaws.com/fast-ai-sample/movie_lens_sample.tgz", 51_790, "10961384dfe7c5181460390a460c1f77";
    /// MovieLens: 100,000 ratings of films. fastai has no checksum of it.
    ML_100K = "https://files.grouplens.org/datasets/movielens/ml-100k.zip";
    /// Threes and sevens of MNIST, as images in folders. 3.2 MB.
    MNIST_SAMPLE = "https://s3.amazonaws.com/fast-ai-sample/mnist_sample.tgz", 3_214_948, "2dbc7ec6f9259b583af0072c55816a88";
    /// A few threes and sevens of MNIST, as images in folders. 342 kB.
    MNIST_TINY = "https://s3.amazonaws.com/fast-ai-sample/mnist_tiny.tgz", 342_207, "56143e8f24db90d925d82a5a74141875";
    /// A few threes and sevens of MNIST in several sizes. 565 kB.
    MNIST_VAR_SIZE_TINY = "https://s3.amazonaws.com/fast-ai-imageclas/mnist_var_size_tiny.tgz", 565_372, "b71a930f4eb744a4a143a6c7ff7ed67f";
    /// A part of the images of the Amazon from above, with tags. 16 MB.
    PLANET_SAMPLE = "https://s3.amazonaws.com/fast-ai-sample/planet_sample.tgz", 15_523_994, "8bfb174b3162f07fbde09b54555bdb00";
    /// A few images of the Amazon from above, with tags. 998 kB.
    PLANET_TINY = "https://s3.amazonaws.com/fast-ai-sample/planet_tiny.tgz", 997_569, "490873c5683454d4b2611fb1f00a68a9";
    /// Imagenette: ten easy classes of ImageNet, in full size. 1.6 GB.
    IMAGENETTE = "https://s3.amazonaws.com/fast-ai-imageclas/imagenette2.tgz", 1_557_161_267, "2c774ecb40005b35d7937d50f5d42336";
    /// Imagenette, the shorter side 160 pixels. 99 MB.
    IMAGENETTE_160 = "https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-160.tgz", 99_003_388, "c475f8f7617a200ba35b9facc48443c3";
    /// Imagenette, the shorter side 320 pixels. 342 MB.
    IMAGENETTE_320 = "https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-320.tgz", 341_663_724, "1f1f74f133caff120e575856659b87a2";
    /// Imagewoof: ten breeds of dogs of ImageNet, in full size. 1.3 GB.
    IMAGEWOOF = "https://s3.amazonaws.com/fast-ai-imageclas/imagewoof2.tgz", 1_343_715_595, "2cc1c1e36e20cb6fd24ffb978edcb487";
    /// Imagewoof, the shorter side 160 pixels. 93 MB.
    IMAGEWOOF_160 = "https://s3.amazonaws.com/fast-ai-imageclas/imagewoof2-160.tgz", 92_612_825, "3559b194123981a540b87132dbda412f";
    /// Imagewoof, the shorter side 320 pixels. 328 MB.
    IMAGEWOOF_320 = "https://s3.amazonaws.com/fast-ai-imageclas/imagewoof2-320.tgz", 328_387_740, "7a1fd92672a559a85de76e4810a20c21";
    /// Imagewang: Imagenette and Imagewoof for learning with few labels, in full size. 2.9 GB.
    IMAGEWANG = "https://s3.amazonaws.com/fast-ai-imageclas/imagewang.tgz", 2_900_347_689, "2b7776bac0fc95db72ac8a3b091a3e30";
    /// Imagewang, the shorter side 160 pixels. 191 MB.
    IMAGEWANG_160 = "https://s3.amazonaws.com/fast-ai-imageclas/imagewang-160.tgz", 191_498_213, "dab9b1d97b95574ac64122a19bc74ca1";
    /// Imagewang, the shorter side 320 pixels. 670 MB.
    IMAGEWANG_320 = "https://s3.amazonaws.com/fast-ai-imageclas/imagewang-320.tgz", 669_826_647, "fff8ac034d60e14fcf7789845e625263";
    /// Dogs and cats, of the Kaggle competition. 839 MB.
    DOGS = "https://s3.amazonaws.com/fast-ai-sample/dogscats.tgz", 839_285_364, "3e483c8d6ef2175e9d395a6027eb92b7";
    /// Caltech 101: objects of 101 classes. 132 MB.
    CALTECH_101 = "https://s3.amazonaws.com/fast-ai-imageclas/caltech_101.tgz", 131_740_031, "d673425306e98ee4619fcdeef8a0e876";
    /// Stanford Cars: 196 models of cars. 2.0 GB.
    CARS = "https://s3.amazonaws.com/fast-ai-imageclas/stanford-cars.tgz", 1_957_803_273, "9045d6673c9ced0889f41816f6bf2f9f";
    /// CIFAR-100: a hundred classes of images of 32x32. 169 MB.
    CIFAR_100 = "https://s3.amazonaws.com/fast-ai-imageclas/cifar100.tgz", 169_168_619, "e5e65dcb54b9d3913f7b8a9ad6607e62";
    /// Caltech-UCSD Birds: 200 species. 1.2 GB.
    CUB_200_2011 = "https://s3.amazonaws.com/fast-ai-imageclas/CUB_200_2011.tgz", 1_150_585_339, "d2acaa99439dff0483c7bbac1bfe2a92";
    /// Oxford Flowers: 102 species. 345 MB.
    FLOWERS = "https://s3.amazonaws.com/fast-ai-imageclas/oxford-102-flowers.tgz", 345_236_087, "5666e01c1311b4c67fcf20d2b3850a88";
    /// Food-101: 101 dishes. 5.7 GB.
    FOOD = "https://s3.amazonaws.com/fast-ai-imageclas/food-101.tgz", 5_686_607_260, "1a540ebf1fb40b2bf3f2294234ba7907";
    /// MNIST, as images in folders. 16 MB.
    MNIST = "https://s3.amazonaws.com/fast-ai-imageclas/mnist_png.tgz", 15_683_414, "03639f83c4e3d19e0a3a53a8a997c487";
    /// Oxford-IIIT Pets: 37 breeds of cats and dogs. 812 MB.
    PETS = "https://s3.amazonaws.com/fast-ai-imageclas/oxford-iiit-pet.tgz", 811_706_944, "e4db5c768afd933bb91f5f594d7417a4";
    /// AG's news: texts of four topics, in CSV files. 12 MB.
    AG_NEWS = "https://s3.amazonaws.com/fast-ai-nlp/ag_news_csv.tgz", 11_784_419, "b86f328f4dbd072486591cb7a5644dcd";
    /// Reviews of products with one to five stars, in CSV files. 72 MB.
    AMAZON_REVIEWS = "https://s3.amazonaws.com/fast-ai-nlp/amazon_review_full_csv.tgz", 71_606_272, "4a1196cf0adaea22f4bc3f592cddde90";
    /// Reviews of products, positive or negative, in CSV files. 688 MB.
    AMAZON_REVIEWS_POLARITY = "https://s3.amazonaws.com/fast-ai-nlp/amazon_review_polarity_csv.tgz", 688_339_454, "676f7e5208ec343c8274b4bb085bc938";
    /// DBpedia: texts of 14 classes, in CSV files. 68 MB.
    DBPEDIA = "https://s3.amazonaws.com/fast-ai-nlp/dbpedia_csv.tgz", 68_341_743, "239c7837b9e79db34486f3de6a00e38e";
    /// The giga-fren corpus: sentences in English and French. 2.6 GB.
    MT_ENG_FRA = "https://s3.amazonaws.com/fast-ai-nlp/giga-fren.tgz", 2_598_183_296, "69573f58e2c850b90f2f954077041d8c";
    /// Sogou news: texts of five topics, in CSV files. 384 MB.
    SOGOU_NEWS = "https://s3.amazonaws.com/fast-ai-nlp/sogou_news_csv.tgz", 384_269_937, "950f1366d33be52f5b944f8a8b680902";
    /// WikiText-103: articles of Wikipedia. 190 MB.
    WIKITEXT = "https://s3.amazonaws.com/fast-ai-nlp/wikitext-103.tgz", 190_200_704, "2dd8cf8693b3d27e9c8f0a7df054b2c7";
    /// WikiText-2: some articles of Wikipedia. 4.1 MB.
    WIKITEXT_TINY = "https://s3.amazonaws.com/fast-ai-nlp/wikitext-2.tgz", 4_070_055, "2a82d47a7b85c8b6a8e068dc4c1d37e7";
    /// Yahoo! Answers: questions and answers of ten topics, in CSV files. 319 MB.
    YAHOO_ANSWERS = "https://s3.amazonaws.com/fast-ai-nlp/yahoo_answers_csv.tgz", 319_476_345, "0632a0d236ef3a529c0fa4429b339f68";
    /// Reviews of businesses with one to five stars, in CSV files. 196 MB.
    YELP_REVIEWS = "https://s3.amazonaws.com/fast-ai-nlp/yelp_review_full_csv.tgz", 196_146_755, "1efd84215ea3e30d90e4c33764b889db";
    /// Reviews of businesses, positive or negative, in CSV files. 166 MB.
    YELP_REVIEWS_POLARITY = "https://s3.amazonaws.com/fast-ai-nlp/yelp_review_polarity_csv.tgz", 166_373_201, "48c8451c1ad30472334d856b5d294807";
    /// Biwi head poses: images of heads, with their positions and angles. 452 MB.
    BIWI_HEAD_POSE = "https://s3.amazonaws.com/fast-ai-imagelocal/biwi_head_pose.tgz", 452_316_199, "00f4ccf66e8cba184bc292fdc08fb237";
    /// CamVid: street scenes, with a class for each pixel. 599 MB.
    CAMVID = "https://s3.amazonaws.com/fast-ai-imagelocal/camvid.tgz", 598_913_237, "648371e4f3a833682afb39b08a3ce2aa";
    /// A few street scenes of CamVid, with a class for each pixel. 2.3 MB.
    CAMVID_TINY = "https://s3.amazonaws.com/fast-ai-sample/camvid_tiny.tgz", 2_314_212, "2cf6daf91b7a2083ecfa3e9968e9d915";
    /// The bedrooms of LSUN. 4.6 GB.
    LSUN_BEDROOMS = "https://s3.amazonaws.com/fast-ai-imageclas/bedroom.tgz", 4_579_163_978, "35d84f38f8a15fe47e66e460c8800d68";
    /// Pascal VOC 2007: images with boxes. 1.6 GB.
    PASCAL_2007 = "https://s3.amazonaws.com/fast-ai-imagelocal/pascal_2007.tgz", 1_637_796_771, "433b4706eb7c42bd74e7f784e3fdf244";
    /// Pascal VOC 2012: images with boxes. 2.6 GB.
    PASCAL_2012 = "https://s3.amazonaws.com/fast-ai-imagelocal/pascal_2012.tgz", 2_618_908_000, "d90e29e54a4c76c0c6fba8355dcbaca5";
    /// Calls of macaques, as audio files. 132 MB.
    MACAQUES = "https://storage.googleapis.com/ml-animal-sounds-datasets/macaques.zip", 131_604_586, "44fec3950e61d6a898f16fe30bc9c88d";
    /// Calls of zebra finches, as audio files. 187 MB.
    ZEBRA_FINCH = "https://storage.googleapis.com/ml-animal-sounds-datasets/zebra_finch.zip", 186_624_896, "91fa9c4ebfc986b9babc2a805a10e281";
    /// A part of the SIIM-ACR X-ray images of chests, as DICOM files. 33 MB.
    SIIM_SMALL = "https://s3.amazonaws.com/fast-ai-imagelocal/siim_small.tgz", 33_276_453, "2f88ac350dce1d971ecbb5ec722da75f";
    /// A part of the TCGA scans, as DICOM files. 15 MB.
    TCGA_SMALL = "https://s3.amazonaws.com/fast-ai-imagelocal/tcga_small.tgz", 14_744_474, "3ceffe7cf522cb1c60e93dc555d8817f";
    /// Weights of OpenAI's first transformer. 433 MB.
    OPENAI_TRANSFORMER = "https://s3.amazonaws.com/fast-ai-modelzoo/transformer.tgz", 432_848_315, "024b0d2203ebb0cd1fc64b27cf8af18e";
    /// Weights and vocabulary of fastai's language model AWD-LSTM, trained on WikiText-103. fastai has no checksum of it.
    WT103_FWD = "https://s3.amazonaws.com/fast-ai-modelzoo/wt103-fwd.tgz";
    /// Weights and vocabulary of fastai's language model AWD-LSTM, trained on WikiText-103 from the end of each text
    /// backwards. fastai has no checksum of it.
    WT103_BWD = "https://s3.amazonaws.com/fast-ai-modelzoo/wt103-bwd.tgz";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_fastais() {
        // 54 rows in `download_checks.py`; three archives have none.
        assert_eq!(PUBLISHED.len(), 54);
        let bytes: u64 = PUBLISHED.iter().map(|row| row.bytes).sum();
        assert_eq!(bytes, 37_601_483_861);
        let sums = PUBLISHED.iter().map(|row| row.md5_of_start);
        assert!(
            sums.clone().all(|sum| sum.len() == 32 && sum.bytes().all(|b| b.is_ascii_hexdigit()))
        );
        let mut urls: Vec<&str> = PUBLISHED.iter().map(|row| row.url).collect();
        urls.sort_unstable();
        urls.dedup();
        assert_eq!(urls.len(), 54);
    }

    #[test]
    fn rows_are_found_by_address() {
        let row = published(Urls::IMAGEWOOF_320).unwrap();
        assert_eq!(
            (row.bytes, row.md5_of_start),
            (328_387_740, "7a1fd92672a559a85de76e4810a20c21")
        );
        assert_eq!(published(Urls::WT103_FWD), None);
        assert!(is_model(Urls::WT103_FWD) && is_model(Urls::OPENAI_TRANSFORMER));
        assert!(!is_model(Urls::IMDB));
    }
}
