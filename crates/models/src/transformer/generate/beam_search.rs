//! Beam search by transformers' rules.

use brigade_torch::Result;
use rand_pcg::Pcg64;
use tch::{Device, Kind, Tensor};

use super::reader::{Prompt, Reader};
use super::rules::Before;
use super::sampling;
use super::text::{Decode, StopStrings};
use super::{CausalModel, GenerationOptions, refused};

/// Stop condition of the beam search of a text (transformers' `early_stopping`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EarlyStopping {
    /// Stops when no running beam has a better score at its present length than the worst finished one (`False`).
    #[default]
    Heuristic,
    /// Stops as soon as a text has as many finished continuations as beams (`True`).
    Full,
    /// Stops when no running beam can reach a better score at any length (`"never"`).
    Never,
}

/// Result of a beam search.
#[derive(Debug)]
pub struct Beams {
    /// Token ids `[batch · num_return_sequences, tokens]`: for each text its continuations, the best first, padded at
    /// the end.
    pub ids: Tensor,
    /// Scores `[batch · num_return_sequences]`, float: sums of log probabilities, divided by the length to the power of
    /// `length_penalty`.
    pub scores: Tensor,
}

/// A beam search that is prepared but not started. Created by [`GenerationOptions::beam_search`].
pub struct BeamSearch<'m, M: CausalModel> {
    reader: Reader<'m, M>,
    prompt: Prompt,
    options: GenerationOptions,
    rng: Pcg64,
    decode: Option<Decode<'m>>,
}

impl GenerationOptions {
    /// Prepares a beam search for the most probable continuations of the ids `[batch, tokens]`, with `num_beams` beams
    /// for each text. With `do_sample` continuations are drawn without replacement. Results, including scores, are
    /// those of transformers 5. Those with `num_beam_groups`, which version 5 does not have, are those of version 4:
    /// the groups are searched one after the other, and the best of all groups are returned.
    ///
    /// ```
    /// use brigade_models::{GenerationOptions, Gpt2LmHead, Gpt2Options};
    /// use brigade_nn::Model;
    /// use tch::Tensor;
    ///
    /// let options = Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 1, ..Default::default() };
    /// let mut model = Model::new(|path| Gpt2LmHead::new(path, &options))?;
    /// model.eval();
    /// let ids = Tensor::from_slice(&[7i64, 8]).view([1, 2]);
    /// let options = GenerationOptions {
    ///     num_beams: 4, num_return_sequences: 2, max_new_tokens: 5, ..Default::default()
    /// };
    /// let beams = options.beam_search(&model, &ids, None)?.run()?;
    /// assert_eq!((beams.ids.size(), beams.scores.size()), (vec![2, 7], vec![2]));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`GenerationOptions::stream`].
    pub fn beam_search<'m, M: CausalModel>(
        &self,
        model: &'m M,
        ids: &Tensor,
        attention_mask: Option<&Tensor>,
    ) -> Result<BeamSearch<'m, M>> {
        self.check()?;
        let prompt = Prompt::new(self, ids, attention_mask)?;
        let reader = Reader::new(model, &prompt, self)?;
        let rng = self.generator()?;
        Ok(BeamSearch { reader, prompt, options: self.clone(), rng, decode: None })
    }
}

impl<'m, M: CausalModel> BeamSearch<'m, M> {
    /// Sets the function that decodes tokens to text, for stop strings.
    #[must_use]
    pub fn decoded_by(mut self, decode: impl Fn(&[i64]) -> Result<String> + 'm) -> Self {
        self.decode = Some(Box::new(decode));
        self
    }

    /// Makes every rank run as many forwards as the longest search needs; see
    /// [`GeneratedTokens::synchronized`](super::GeneratedTokens::synchronized).
    #[must_use]
    pub fn synchronized(mut self, any_rank: impl Fn(bool) -> Result<bool> + 'm) -> Self {
        self.reader.synchronize(any_rank);
        self
    }

    /// Runs the search, and returns the best texts.
    ///
    /// # Errors
    /// Returns the errors of the model and of the decoding function.
    pub fn run(mut self) -> Result<Beams> {
        tch::no_grad(|| {
            let found = self.search()?;
            self.reader.finish()?;
            self.beams(&found)
        })
    }

    fn search(&mut self) -> Result<Vec<Vec<Finished>>> {
        let GenerationOptions { num_beams, num_beam_groups, .. } = self.options;
        let (beams, groups) = (num_beams as usize, num_beam_groups as usize);
        let rules = Rules {
            length_penalty: self.options.length_penalty,
            early_stopping: self.options.early_stopping,
            beams: beams / groups,
            longest: self.prompt.left,
        };
        let texts = self.prompt.rows.len();
        let mut searches: Vec<Vec<TextSearch>> =
            (0..texts).map(|_| (0..groups).map(|_| TextSearch::new(&rules)).collect()).collect();
        let device = self.prompt.ids.device();
        for written in 0..self.prompt.left {
            let logits = self.reader.logits()?.whole()?;
            let logits = sampling::as_float(&logits)?;
            let mut scores = logits.f_log_softmax(-1, logits.kind())?;
            if written == 0 {
                let copies = Tensor::f_arange(texts as i64, (Kind::Int64, device))?
                    .f_repeat_interleave_self_int(num_beams, 0, None)?;
                self.reader.select_rows(&copies)?;
                // A device map may compute on another device than that of the prompt.
                scores = scores.f_index_select(0, &copies.f_to_device(scores.device())?)?;
            }
            if scores.size()[0] != texts as i64 * num_beams {
                return Err(refused(format!("the model gave logits {:?}", logits.size())));
            }
            let (parents, tokens) = self.step(&scores, &mut searches, &rules, written)?;
            let is_open = |search: &TextSearch| search.is_open(&rules);
            if written + 1 == self.prompt.left || !searches.iter().flatten().any(is_open) {
                break;
            }
            if parents.iter().enumerate().any(|(row, &parent)| row as i64 != parent) {
                let rows = Tensor::f_from_slice(&parents)?.f_to_device(device)?;
                self.reader.select_rows(&rows)?;
            }
            let column = Tensor::f_from_slice(&tokens)?.f_unsqueeze(1)?.f_to_device(device)?;
            self.reader.push(column)?;
        }
        let found = searches.into_iter().map(|groups| {
            let mut all: Vec<Finished> =
                groups.into_iter().flat_map(|search| search.finished).collect();
            all.sort_by(|one, other| other.score.total_cmp(&one.score));
            all
        });
        Ok(found.collect())
    }

    /// Takes one token for each beam. Returns the rows that the beams continue, and their tokens.
    fn step(
        &mut self,
        scores: &Tensor,
        searches: &mut [Vec<TextSearch>],
        rules: &Rules,
        written: i64,
    ) -> Result<(Vec<i64>, Vec<i64>)> {
        let GenerationOptions { num_beams, num_beam_groups, .. } = self.options;
        let (texts, vocabulary) = (searches.len() as i64, scores.size()[1]);
        let of_group = num_beams / num_beam_groups;
        let scores = scores.f_view([texts, num_beams, vocabulary])?;
        let kept = (self.options.eos_token_id.len() as i64 + 1).max(2);
        let stops = StopStrings::new(&self.options.stop_strings, self.decode.as_ref())?;
        // For each text, the number of beams in earlier groups that have taken a token.
        let taken = Tensor::f_zeros([texts, 1, vocabulary], (scores.kind(), scores.device()))?;
        let (mut parents, mut tokens) =
            (vec![0; (texts * num_beams) as usize], vec![0; (texts * num_beams) as usize]);
        for group in 0..num_beam_groups as usize {
            let begin = group as i64 * of_group;
            let mut own = scores.f_narrow(1, begin, of_group)?;
            if group > 0 && self.options.diversity_penalty != 0.0 {
                own = own.f_sub(&taken.f_mul_scalar(self.options.diversity_penalty)?)?;
            }
            let own = own.f_reshape([texts * of_group, vocabulary])?;
            let own = self.processed(&own, searches, group, written)?;
            let running: Vec<f32> = searches
                .iter()
                .flat_map(|text| text[group].running.iter().map(|beam| beam.score))
                .collect();
            let running = Tensor::f_from_slice(&running)?.f_to_device(own.device())?;
            let sums =
                own.f_add(&running.f_unsqueeze(1)?)?.f_view([texts, of_group * vocabulary])?;
            let count = (kept * of_group).min(of_group * vocabulary);
            let places = if self.options.do_sample {
                sampling::noisy(&sums, &mut self.rng)?.f_topk(count, -1, true, true)?.1
            } else {
                sums.f_topk(count, -1, true, true)?.1
            };
            let values = sums.f_gather(1, &places, false)?.f_to_kind(Kind::Float)?;
            let values = Vec::<Vec<f32>>::try_from(values.f_to_device(Device::Cpu)?)?;
            let places = Vec::<Vec<i64>>::try_from(places.f_to_device(Device::Cpu)?)?;
            for (text, (values, places)) in values.into_iter().zip(places).enumerate() {
                let search = &mut searches[text][group];
                let mut candidates = Vec::with_capacity(values.len());
                for (score, place) in values.into_iter().zip(places) {
                    let (beam, token) = ((place / vocabulary) as usize, place % vocabulary);
                    let is_longest = written + 1 == rules.longest;
                    let mut ends = is_longest || self.options.eos_token_id.contains(&token);
                    if !ends && !self.options.stop_strings.is_empty() {
                        let text = &self.prompt.rows[text];
                        let before = &search.running[beam].tokens;
                        ends = stops.are_met(&[text, before.as_slice(), &[token]].concat())?;
                    }
                    candidates.push(Candidate { score, beam, token, ends });
                }
                search.step(&candidates, rules);
                let first = text as i64 * num_beams + begin;
                for (beam, running) in (first as usize..).zip(&search.running) {
                    let token = running.tokens.last().copied().unwrap_or(0);
                    (parents[beam], tokens[beam]) = (first + running.parent as i64, token);
                    if group + 1 < num_beam_groups as usize {
                        let _ = taken.f_get(text as i64)?.f_select(1, token)?.f_add_scalar_(1.0)?;
                    }
                }
            }
        }
        Ok((parents, tokens))
    }

    /// Returns the log probabilities of a group's beams after the rules on tokens and those of sampling.
    fn processed(
        &self,
        scores: &Tensor,
        searches: &[Vec<TextSearch>],
        group: usize,
        written: i64,
    ) -> Result<Tensor> {
        let rows: Vec<Vec<i64>> = searches
            .iter()
            .zip(&self.prompt.rows)
            .flat_map(|(text, prompt)| {
                let of_beam = |beam: &Running| [prompt.as_slice(), &beam.tokens].concat();
                text[group].running.iter().map(of_beam)
            })
            .collect();
        let (ids, mask) = self.options.padded(&rows, scores.device())?;
        let left = self.prompt.left - written;
        let before = Before { ids: &ids, mask: Some(&mask), rows: &rows, written, left };
        let scores = sampling::processed(scores, before, &self.options)?;
        if !self.options.do_sample {
            return Ok(scores);
        }
        let kept = (self.options.eos_token_id.len() as i64 + 1).max(2);
        sampling::filtered(&scores, &self.options, kept)
    }

    fn beams(&self, found: &[Vec<Finished>]) -> Result<Beams> {
        let count = self.options.num_return_sequences as usize;
        let best: Vec<&Finished> = found.iter().flat_map(|text| text.iter().take(count)).collect();
        let device = self.prompt.ids.device();
        let longest = best.iter().map(|text| text.tokens.len()).max().unwrap_or(0);
        let pad = self.options.pad();
        let tokens: Vec<i64> = best
            .iter()
            .flat_map(|text| {
                let padding = std::iter::repeat_n(pad, longest - text.tokens.len());
                text.tokens.iter().copied().chain(padding)
            })
            .collect();
        let tokens = Tensor::f_from_slice(&tokens)?.f_view([best.len() as i64, longest as i64])?;
        let prompt = self.prompt.ids.f_repeat_interleave_self_int(count as i64, 0, None)?;
        let ids = Tensor::f_cat(&[&prompt, &tokens.f_to_device(device)?], 1)?;
        let scores: Vec<f32> = best.iter().map(|text| text.score).collect();
        Ok(Beams { ids, scores: Tensor::f_from_slice(&scores)?.f_to_device(device)? })
    }
}

impl<M: CausalModel> std::fmt::Debug for BeamSearch<'_, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BeamSearch").field("options", &self.options).finish_non_exhaustive()
    }
}

/// Score of an excluded token, as in transformers.
const NEVER: f32 = -1e9;

/// Parameters of a search.
struct Rules {
    length_penalty: f64,
    early_stopping: EarlyStopping,
    /// Number of beams in a group.
    beams: usize,
    /// Maximum number of generated tokens.
    longest: i64,
}

/// Token that may follow a running beam.
struct Candidate {
    score: f32,
    beam: usize,
    token: i64,
    ends: bool,
}

/// Text that is being continued.
#[derive(Clone)]
struct Running {
    /// The generated tokens.
    tokens: Vec<i64>,
    score: f32,
    /// Index of the beam in the previous step that this one continues.
    parent: usize,
}

/// Finished text, or an empty slot for one (`is_sent_finished` of transformers is false).
#[derive(Clone)]
struct Finished {
    tokens: Vec<i64>,
    score: f32,
    is_text: bool,
}

/// Search of one text by one group of beams. Scores are computed in float32, as in transformers.
struct TextSearch {
    running: Vec<Running>,
    /// Finished texts, best first, one slot for each beam.
    finished: Vec<Finished>,
    can_improve: bool,
    /// `true` if all candidates of the last step have ended.
    all_ended: bool,
}

impl TextSearch {
    fn new(rules: &Rules) -> Self {
        // All beams are equal at first: only the first one counts in the first step.
        let score = |beam| if beam == 0 { 0.0 } else { NEVER };
        let running = (0..rules.beams)
            .map(|beam| Running { tokens: Vec::new(), score: score(beam), parent: beam })
            .collect();
        let nothing = Finished { tokens: Vec::new(), score: NEVER, is_text: false };
        let finished = vec![nothing; rules.beams];
        Self { running, finished, can_improve: true, all_ended: false }
    }

    /// Returns `true` if a further step can change the result.
    fn is_open(&self, rules: &Rules) -> bool {
        let is_full = rules.early_stopping == EarlyStopping::Full && self.is_full();
        self.can_improve && !is_full && !self.all_ended
    }

    fn is_full(&self) -> bool {
        self.finished.iter().all(|text| text.is_text)
    }

    /// Processes the candidates, best first.
    fn step(&mut self, candidates: &[Candidate], rules: &Rules) {
        let written = self.running[0].tokens.len() as i64 + 1;
        let extended = |candidate: &Candidate| {
            let mut tokens = self.running[candidate.beam].tokens.clone();
            tokens.push(candidate.token);
            tokens
        };
        let divisor = (written as f64).powf(rules.length_penalty) as f32;
        let is_closed = rules.early_stopping == EarlyStopping::Full && self.is_full();
        let mut finished = self.finished.clone();
        finished.extend(candidates.iter().enumerate().map(|(place, candidate)| {
            // Candidates after the first `beams` ones serve only as continuations, in case all of the first ones have
            // ended.
            let is_text = candidate.ends && place < rules.beams;
            let mut score = candidate.score / divisor;
            for is_out in [is_closed, !self.can_improve, !is_text] {
                score += if is_out { NEVER } else { 0.0 };
            }
            Finished { tokens: extended(candidate), score, is_text }
        }));
        finished.sort_by(|one, other| other.score.total_cmp(&one.score));
        finished.truncate(rules.beams);

        let mut running: Vec<Running> = candidates
            .iter()
            .map(|candidate| Running {
                tokens: extended(candidate),
                score: candidate.score + if candidate.ends { NEVER } else { 0.0 },
                parent: candidate.beam,
            })
            .collect();
        running.sort_by(|one, other| other.score.total_cmp(&one.score));
        running.truncate(rules.beams);
        self.all_ended = candidates.iter().all(|candidate| candidate.ends);
        (self.running, self.finished) = (running, finished);

        let is_never = rules.early_stopping == EarlyStopping::Never && rules.length_penalty > 0.0;
        let length = if is_never { rules.longest } else { written };
        let best = self.running[0].score / (length as f64).powf(rules.length_penalty) as f32;
        let worst = self.finished.iter().map(|text| text.score).fold(f32::INFINITY, f32::min);
        let is_beaten = |text: &Finished| best > if text.is_text { worst } else { NEVER };
        self.can_improve &= self.finished.iter().any(is_beaten);
    }
}
