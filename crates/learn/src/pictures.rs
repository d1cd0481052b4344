//! Plots of a fit and of a model's inputs, as data: each can be a PNG or SVG file, or text on a terminal
//! (`brigade_plot::Plot`).

use brigade_plot::{Chart, ColorMap, Gallery, Grid, Heatmap, Picture as Shown};
use brigade_torch::{Error, Result};
use tch::{Device, Tensor};

use crate::callbacks::{ActivationStats, LayerStats, RANGE};
use crate::error::LearnError;
use crate::interpretation::{ClassInterpretation, Interpretation};
use crate::learner::{Learner, LrFinding, Part, Suggestion};
use crate::loaders::{Parts, Picture};
use crate::recorder::Recorder;

impl Recorder {
    /// Plots the smoothed training loss of each batch from `skip` on, and the validation losses at the ends of epochs.
    #[must_use]
    pub fn plot_loss(&self, skip: usize) -> Chart {
        let train = self.smooth_losses.iter().enumerate().skip(skip);
        let train: Vec<(f64, f64)> = train.map(|(batch, loss)| (batch as f64, *loss)).collect();
        let valid = self.iters.iter().zip(self.column("valid_loss"));
        let valid: Vec<(f64, f64)> = valid
            .filter_map(|(batch, loss)| Some((batch.saturating_sub(1) as f64, loss?)))
            .collect();
        let chart = Chart::new("Loss").x("batch").y("loss").line("train", train);
        if valid.is_empty() { chart } else { chart.line("valid", valid) }
    }

    /// Plots learning rate and momentum of each batch.
    #[must_use]
    pub fn plot_schedule(&self) -> Grid {
        let points = |values: &[f64]| -> Vec<(f64, f64)> {
            values.iter().enumerate().map(|(batch, value)| (batch as f64, *value)).collect()
        };
        let rate = Chart::new("Learning rate").x("batch").line("lr", points(&self.lrs));
        let momentum = Chart::new("Momentum").x("batch").line("momentum", points(&self.momenta));
        Grid::new("Schedule").panel(rate).panel(momentum)
    }

    /// Plots each column by epoch: the losses in one chart, each metric in its own.
    #[must_use]
    pub fn plot_metrics(&self) -> Grid {
        let points = |name: &str| -> Vec<(f64, f64)> {
            let values = self.rows.iter().zip(self.column(name));
            values.filter_map(|(row, value)| Some((row.epoch as f64, value?))).collect()
        };
        let (losses, metrics): (Vec<&String>, Vec<&String>) =
            self.names.iter().partition(|name| name.ends_with("loss"));
        let mut chart = Chart::new("Loss").x("epoch");
        for name in losses {
            chart = chart.line(name.as_str(), points(name));
        }
        let mut grid = Grid::new("Metrics").panel(chart);
        for name in metrics {
            grid =
                grid.panel(Chart::new(name.as_str()).x("epoch").line(name.as_str(), points(name)));
        }
        grid
    }
}

impl LrFinding {
    /// Plots the smoothed loss over the learning rate, and marks the suggestions that can be made.
    #[must_use]
    pub fn plot(&self, rules: &[Suggestion]) -> Chart {
        let (lrs, losses) = self.curve();
        let points: Vec<(f64, f64)> = lrs.iter().copied().zip(losses.iter().copied()).collect();
        let mut chart = Chart::new("Learning-rate finder")
            .x("learning rate")
            .y("loss")
            .log_x()
            .line("loss", points);
        for rule in rules {
            let Some(rate) = rule.of(lrs, losses) else { continue };
            let nearest = lrs.iter().zip(losses).min_by(|a, b| {
                let distance = |lr: f64| (lr.ln() - rate.ln()).abs();
                distance(*a.0).total_cmp(&distance(*b.0))
            });
            if let Some((_, loss)) = nearest {
                chart = chart.point(rate, *loss, format!("{} {rate:.2e}", rule.name()));
            }
        }
        chart
    }
}

impl ClassInterpretation {
    /// Plots the confusion matrix: rows are the actual classes, columns the predicted ones. With `normalize`, counts
    /// are divided by the sum of their row.
    ///
    /// # Errors
    /// Fails for data without classes.
    pub fn plot_confusion_matrix(&self, normalize: bool) -> Result<Heatmap> {
        let counts = self.confusion_matrix().into_iter().flatten().collect();
        let matrix = Heatmap::confusion(self.class_names(), counts).map_err(LearnError::from)?;
        Ok(if normalize { matrix.by_row() } else { matrix })
    }

    /// Draws the `k` samples with the largest losses: prediction, actual class, loss, and the probability of the
    /// prediction.
    ///
    /// # Errors
    /// Fails when the data have no pictures, or the samples cannot be read.
    pub fn plot_top_losses(&self, learner: &Learner, k: usize) -> Result<Gallery> {
        let (targets, decoded) = self.pairs();
        let names = self.class_names();
        let probabilities = &self.interpretation().predictions().predictions;
        let top = self.interpretation().top_losses(k);
        let indices: Vec<usize> = top.iter().map(|(index, _)| *index).collect();
        let pictures = learner.pictures_of(self.interpretation().part(), &indices)?;
        let mut gallery = Gallery::new("Prediction / Actual / Loss / Probability");
        for ((index, loss), picture) in top.into_iter().zip(pictures) {
            let (Some(actual), Some(predicted)) = (targets.get(index), decoded.get(index)) else {
                continue;
            };
            let probability = probabilities.f_double_value(&[index as i64, *predicted as i64])?;
            let text = format!("{} / {}", names[*predicted], names[*actual]);
            let picture = shown(picture)?;
            let picture =
                if actual == predicted { picture.caption(text) } else { picture.wrong(text) };
            gallery = gallery.picture(picture.caption(format!("{loss:.2} / {probability:.2}")));
        }
        Ok(gallery)
    }
}

impl Interpretation {
    /// Draws the `k` samples with the largest losses, each with its loss.
    ///
    /// # Errors
    /// Fails when the data have no pictures, or the samples cannot be read.
    pub fn plot_top_losses(&self, learner: &Learner, k: usize) -> Result<Gallery> {
        let top = self.top_losses(k);
        let indices: Vec<usize> = top.iter().map(|(index, _)| *index).collect();
        let pictures = learner.pictures_of(self.part(), &indices)?;
        let mut gallery = Gallery::new("Top losses");
        for ((_, loss), picture) in top.into_iter().zip(pictures) {
            gallery = gallery.picture(shown(picture)?.caption(format!("loss {loss:.3}")));
        }
        Ok(gallery)
    }
}

impl ActivationStats {
    /// Plots mean, standard deviation and the share near zero of every layer.
    #[must_use]
    pub fn plot_stats(&self) -> Grid {
        let panel = |title: &str, of: fn(&LayerStats) -> &[f64]| {
            let mut chart = Chart::new(title).x("batch");
            for stats in self.stats() {
                let points = stats.steps.iter().zip(of(stats));
                let points: Vec<(f64, f64)> =
                    points.map(|(step, value)| (*step as f64, *value)).collect();
                chart = chart.line(stats.layer.as_str(), points);
            }
            chart
        };
        Grid::new("Activations")
            .panel(panel("Mean", |layer| &layer.means))
            .panel(panel("Deviation", |layer| &layer.deviations))
            .panel(panel("Near zero", |layer| &layer.near_zero))
    }

    /// Plots the histograms of a layer's absolute outputs over the batches: a column for each batch, colours by the
    /// logarithm of the counts (fastai's `color_dim`).
    ///
    /// # Errors
    /// Fails when no layer has this name, or it has no measurements.
    pub fn plot_histogram(&self, layer: &str) -> Result<Heatmap> {
        let stats = self.stats().iter().find(|it| it.layer == layer).ok_or_else(|| {
            let known: Vec<&str> = self.stats().iter().map(|it| it.layer.as_str()).collect();
            Error::invalid_argument(format!(
                "no layer {layer:?} was measured; there are {}",
                known.join(", ")
            ))
        })?;
        let (columns, rows) =
            (stats.histograms.len(), stats.histograms.first().map_or(0, Vec::len));
        let values = (0..rows)
            .flat_map(|row| stats.histograms.iter().map(move |counts| counts[row]))
            .collect();
        // Each column covers the batches up to the next one that was measured.
        let apart = stats.steps.windows(2).next().map_or(1, |pair| pair[1] - pair[0]);
        let end = stats.steps.last().map_or(0, |last| last + apart) as f64;
        Ok(Heatmap::new(rows, columns, values)
            .map_err(LearnError::from)?
            .title(format!("Outputs of {layer}"))
            .x("batch")
            .y("absolute value")
            .colors(ColorMap::Viridis)
            .log()
            .upwards()
            .x_range(0.0, end)
            .y_range(0.0, RANGE))
    }
}

impl Learner {
    /// Draws samples of the next training batch, transformed, with their targets (fastai's `show_batch`).
    ///
    /// # Errors
    /// Fails when the batch cannot be made, or the data have no pictures.
    pub fn show_batch(&self, samples: usize) -> Result<Gallery> {
        let parts = self.train.sample(samples)?;
        self.gallery("Training batch", &parts, None)
    }

    /// Draws samples of the validation data with their targets and predictions (fastai's `show_results`); a wrong class
    /// is red. One rank alone can call it outside of [`Learner::distributed`]; with a sharded model every rank calls
    /// it.
    ///
    /// # Errors
    /// Fails when the batch cannot be made, or the data have no pictures.
    pub fn show_results(&mut self, samples: usize) -> Result<Gallery> {
        let valid = self.valid.as_ref().ok_or_else(no_validation)?;
        let parts = valid.sample(samples)?;
        let output = self.forward(&parts.inputs)?.f_to_device(Device::Cpu)?;
        let decoded = self.state.loss.decode(&output)?;
        self.gallery("Target / Prediction", &parts, Some(&decoded))
    }

    fn gallery(&self, title: &str, parts: &Parts, decoded: Option<&Tensor>) -> Result<Gallery> {
        let codec = self.state.codec.as_ref().ok_or_else(no_pictures)?;
        let classes = self.state.class_names();
        let rows = parts.inputs.first().and_then(|it| it.size().first().copied()).unwrap_or(0);
        let mut gallery = Gallery::new(title);
        for row in 0..rows {
            let target = codec.show(&parts.inputs, parts.target.as_ref(), row, classes)?;
            let (picture, target) = target.ok_or_else(no_pictures)?;
            let mut picture = shown(picture)?;
            match decoded {
                None => picture = picture.caption(target),
                Some(decoded) => {
                    let predicted = codec.show(&parts.inputs, Some(decoded), row, classes)?;
                    let (masked, predicted) = predicted.ok_or_else(no_pictures)?;
                    if target.is_empty() && predicted.is_empty() {
                        // Masks are shown in the images themselves: each target beside its prediction.
                        gallery = gallery.columns(4).picture(picture.caption("target"));
                        picture = shown(masked)?.caption("prediction");
                    } else {
                        picture = picture.caption(target.as_str());
                        picture = if target == predicted {
                            picture.caption(predicted)
                        } else {
                            picture.wrong(predicted)
                        };
                    }
                }
            }
            gallery = gallery.picture(picture);
        }
        Ok(gallery)
    }

    /// Returns the pictures of these samples.
    fn pictures_of(&self, part: Part, indices: &[usize]) -> Result<Vec<Picture>> {
        let source = match part {
            Part::Train => &self.train,
            Part::Valid => self.valid.as_ref().ok_or_else(no_validation)?,
        };
        let codec = self.state.codec.as_ref().ok_or_else(no_pictures)?;
        let Parts { inputs, .. } = source.rows(indices)?;
        (0..indices.len() as i64)
            .map(|row| codec.picture(&inputs, row)?.ok_or_else(no_pictures))
            .collect()
    }
}

fn no_pictures() -> Error {
    Error::invalid_argument(
        "these data cannot be drawn: give the Loaders a codec, or make them by a DataBlock of images",
    )
}

fn no_validation() -> Error {
    Error::invalid_argument("the Loaders have no validation data; make them with `Loaders::new`")
}

fn shown(Picture { width, height, rgb }: Picture) -> Result<Shown> {
    Ok(Shown::rgb(width, height, rgb).map_err(LearnError::from)?)
}
