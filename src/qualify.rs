//! Qualification: whether the faster tiers of arithmetic that a device offers are right on it.
//!
//! Drivers translate half precision and cooperative matrices less well than plain arithmetic, and some of them wrongly. So a tier is
//! off until it has computed small problems on the very device and was held against the [`reference`](mod@crate::reference), by
//! the tolerance that plain arithmetic is held to.

use crate::attention::{
    Alignment, Attention, AttentionArguments, AttentionProblem, AttentionRules,
};
use crate::compare::{Comparison, Tolerance, compare};
use crate::kernels::Tier;
use crate::plan::Plan;
use crate::reference::{self, AttentionInputs, Broadcast, Rules};
use crate::{ElementType, Gpu, Result, Tensor, TensorView};
use half::f16;
use std::fmt;

/// What [`Gpu::qualify`] found of one tier.
#[derive(Clone, Debug, PartialEq)]
pub struct Qualification {
    /// The tier.
    pub tier: Tier,
    /// Whether it is right.
    pub verdict: Verdict,
}

/// Whether a tier is right.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Verdict {
    /// Every problem was computed within the tolerance.
    Right {
        /// How many there were.
        problems: usize,
        /// The largest error, as a share of what is allowed: at most 1.
        worst: f64,
    },
    /// A problem came out wrong: the tier stays off.
    Wrong {
        /// Which one.
        problem: String,
        /// How far off it was, and where.
        comparison: Box<Comparison>,
    },
    /// A problem could not be computed: the tier stays off.
    Failed {
        /// Which one.
        problem: String,
        /// Why: the driver's words, where it refused a kernel.
        reason: String,
    },
}

impl Qualification {
    /// Whether the tier may be used.
    #[must_use]
    pub fn passed(&self) -> bool {
        matches!(self.verdict, Verdict::Right { .. })
    }
}

impl fmt::Display for Qualification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.verdict {
            Verdict::Right { problems, worst } => write!(
                f,
                "{}: right in {problems} problems, the largest error {:.0} % of what is allowed",
                self.tier,
                100.0 * worst
            ),
            Verdict::Wrong {
                problem,
                comparison,
            } => write!(f, "{}: wrong in {problem}: {comparison}", self.tier),
            Verdict::Failed { problem, reason } => {
                write!(f, "{}: failed in {problem}: {reason}", self.tier)
            }
        }
    }
}

impl Gpu {
    /// Tries every faster tier of arithmetic that the device offers, and gives a handle of the same device whose plans may use those that
    /// are right, with what was found of each. A tier that is wrong, or that the driver refuses, is logged and stays off.
    ///
    /// It compiles a few kernels a tier and computes some small problems, so do it once. What was planned by other handles stays as it is.
    ///
    /// ```no_run
    /// # fn main() -> wgpu_attention::Result<()> {
    /// let gpu = wgpu_attention::Gpu::open_blocking(&Default::default())?;
    /// let (gpu, found) = gpu.qualify_blocking()?;
    /// for tier in &found {
    ///     println!("{tier}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::DeviceLost`](crate::Error::DeviceLost). What else goes wrong is found of the tier that it went wrong with.
    pub async fn qualify(&self) -> Result<(Gpu, Vec<Qualification>)> {
        self.qualify_changed(|plan| plan).await
    }

    /// [`qualify`](Self::qualify), waiting on this thread.
    ///
    /// # Errors
    ///
    /// As [`qualify`](Self::qualify).
    #[cfg(not(target_family = "wasm"))]
    pub fn qualify_blocking(&self) -> Result<(Gpu, Vec<Qualification>)> {
        pollster::block_on(self.qualify())
    }

    /// [`qualify`](Self::qualify) of plans that were changed: for tests, which put wrong kernels in them.
    ///
    /// # Errors
    ///
    /// As [`qualify`](Self::qualify).
    #[doc(hidden)]
    pub async fn qualify_changed(
        &self,
        change: impl Fn(Plan) -> Plan,
    ) -> Result<(Gpu, Vec<Qualification>)> {
        let mut capabilities = self.capabilities().clone();
        capabilities.qualified_tiers.clear();
        let mut found = Vec::new();
        for tier in self.capabilities().offered_tiers.iter().copied() {
            // A handle that may use this one alone.
            let mut trial = capabilities.clone();
            trial.qualified_tiers = vec![tier];
            let trial = self.with_capabilities(trial);
            let verdict = try_tier(&trial, tier, &change).await;
            // (A device that is gone says nothing of the tier.)
            self.alive()?;
            found.push(Qualification { tier, verdict });
        }
        for one in &found {
            if one.passed() {
                log::info!("{one}");
                capabilities.qualified_tiers.push(one.tier);
            } else {
                log::warn!("{one}; it stays off");
            }
        }
        Ok((self.with_capabilities(capabilities), found))
    }
}

/// All problems, up to the first that is wrong.
async fn try_tier(gpu: &Gpu, tier: Tier, change: &impl Fn(Plan) -> Plan) -> Verdict {
    let mut worst = 0.0f64;
    let trials = trials(tier);
    for trial in &trials {
        match trial.run(gpu, change).await {
            Err(error) => {
                return Verdict::Failed {
                    problem: trial.name.into(),
                    reason: error.to_string(),
                };
            }
            Ok(comparisons) => {
                for comparison in comparisons {
                    if !comparison.passed() {
                        return Verdict::Wrong {
                            problem: trial.name.into(),
                            comparison: Box::new(comparison),
                        };
                    }
                    worst = worst.max(comparison.worst_ratio);
                }
            }
        }
    }
    Verdict::Right {
        problems: trials.len(),
        worst,
    }
}

/// A small problem.
struct Trial {
    name: &'static str,
    problem: AttentionProblem,
    /// Whether every third pair or so is hidden by a mask, all keys of query 3 among them, and key 5 from everyone.
    masked: bool,
    /// Whether keys and values that nobody may see are NaN; and, without a mask, one value that some see infinite.
    spoilt: bool,
    /// How much larger than usual queries are.
    large: f32,
}

/// Around the edges of tiles, with every kind of rule that kernels treat apart.
fn trials(tier: Tier) -> Vec<Trial> {
    let problem = |heads, kv_heads, q_len, kv_len, head_dim, value_dim| AttentionProblem {
        kv_heads,
        kv_len,
        value_dim,
        tier: Some(tier),
        out_type: ElementType::F32,
        ..AttentionProblem::new(2, heads, q_len, head_dim).stored_as(ElementType::F16)
    };
    let trial = |name, problem| Trial {
        name,
        problem,
        masked: false,
        spoilt: false,
        large: 1.0,
    };
    let causal = |problem: AttentionProblem, alignment| AttentionProblem {
        rules: AttentionRules::causal(alignment),
        ..problem
    };
    // Channels that are no whole chunk; matrices take multiples of 16.
    let (head_dim, value_dim) = match tier {
        Tier::Matrices => (80, 48),
        _ => (37, 27),
    };
    vec![
        trial(
            "64 channels, every key seen",
            problem(2, 2, 65, 129, 64, 64),
        ),
        trial(
            "128 channels, causal",
            causal(problem(4, 2, 33, 97, 128, 128), Alignment::BottomRight),
        ),
        Trial {
            spoilt: true,
            ..trial(
                "causal, with NaN behind what is seen and an infinity that some see",
                causal(problem(2, 1, 40, 70, 64, 64), Alignment::TopLeft),
            )
        },
        Trial {
            masked: true,
            spoilt: true,
            ..trial("a mask, with NaN behind it", problem(2, 2, 50, 66, 64, 128))
        },
        Trial {
            large: 5000.0,
            ..trial(
                "sums past what f16 holds",
                AttentionProblem {
                    rules: AttentionRules {
                        scale: Some(1.77e-5),
                        ..Default::default()
                    },
                    ..problem(1, 1, 17, 48, 128, 64)
                },
            )
        },
        Trial {
            problem: AttentionProblem {
                out_type: ElementType::F16,
                ..problem(1, 1, 31, 63, head_dim, value_dim)
            },
            ..trial(
                "channels that are no whole chunk, to f16",
                problem(1, 1, 1, 1, 16, 16),
            )
        },
        Trial {
            masked: true,
            problem: AttentionProblem {
                rules: AttentionRules {
                    softcap: Some(3.0),
                    window_left: Some(20),
                    alignment: Some(Alignment::BottomRight),
                    ..Default::default()
                },
                ..problem(2, 2, 70, 90, 64, 64)
            },
            ..trial("softcap, a window and a mask", problem(1, 1, 1, 1, 16, 16))
        },
    ]
}

/// Numbers that look random and are the same every time.
struct Numbers(u64);

impl Numbers {
    /// Roughly normal with deviation 1, as f16 holds it.
    fn next(&mut self) -> f16 {
        let mut sum = -6.0f32;
        for _ in 0..12 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            sum += (self.0 >> 40) as f32 / (1u64 << 24) as f32;
        }
        f16::from_f32(sum)
    }

    fn take(&mut self, count: usize, factor: f32) -> Vec<f16> {
        let scaled = |value: f16| f16::from_f32(value.to_f32() * factor);
        (0..count).map(|_| scaled(self.next())).collect()
    }
}

impl Trial {
    /// Output and log-sum-exp against the reference.
    async fn run(&self, gpu: &Gpu, change: &impl Fn(Plan) -> Plan) -> Result<Vec<Comparison>> {
        let mut problem = self.problem.clone();
        problem.rules.mask = self.masked;
        let AttentionProblem {
            batch,
            heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            ..
        } = problem;
        let mut numbers = Numbers(1 + (q_len * kv_len * head_dim) as u64);
        let q = numbers.take(batch * q_len * heads * head_dim, self.large);
        let mut k = numbers.take(batch * kv_len * kv_heads * head_dim, 1.0);
        let mut v = numbers.take(batch * kv_len * kv_heads * value_dim, 1.0);
        let seen = |query: usize, key: usize| {
            query != 3 && key != 5 && !(query * 7 + key * 5).is_multiple_of(3)
        };
        let mask: Vec<bool> = (0..q_len * kv_len)
            .map(|pair| seen(pair / kv_len, pair % kv_len))
            .collect();
        if self.spoilt {
            let last_seen = match problem.rules.causal {
                true => q_len - 1,
                false => kv_len,
            };
            for item in 0..batch {
                for key in (0..kv_len).filter(|key| self.masked && *key == 5 || *key > last_seen) {
                    let row = |width: usize| {
                        let width = kv_heads * width;
                        (item * kv_len + key) * width..(item * kv_len + key + 1) * width
                    };
                    k[row(head_dim)].fill(f16::NAN);
                    v[row(value_dim)].fill(f16::NAN);
                }
            }
            if !self.masked {
                // Of the first item and the first head, among its first and its last channels, and seen by those who come later.
                let row = 20 * kv_heads * value_dim;
                v[row + 7] = f16::INFINITY;
                v[row + value_dim - 3] = f16::INFINITY;
            }
        }

        let wide = |values: &[f16]| {
            values
                .iter()
                .map(|value| value.to_f64())
                .collect::<Vec<_>>()
        };
        let expected = reference::attention_without_weights(&AttentionInputs {
            batch,
            heads,
            kv_heads: Some(kv_heads),
            q_len,
            kv_len,
            head_dim,
            value_dim: Some(value_dim),
            q: &wide(&q),
            k: &wide(&k),
            v: &wide(&v),
            rules: Rules {
                scale: problem.rules.scale.map(f64::from),
                softcap: problem.rules.softcap.map(f64::from),
                causal: problem.rules.causal,
                alignment: problem.rules.alignment.map(|alignment| match alignment {
                    Alignment::TopLeft => reference::Alignment::TopLeft,
                    Alignment::BottomRight => reference::Alignment::BottomRight,
                }),
                window_left: problem.rules.window_left,
                mask: self.masked.then_some(Broadcast {
                    values: &mask,
                    shape: [1, 1, q_len, kv_len],
                }),
                ..Default::default()
            },
        })?;

        let upload = |tokens: usize, heads: usize, width: usize, values: &[f16]| {
            Tensor::from_slice(gpu, &[batch, tokens, heads, width], values)
        };
        let q = upload(q_len, heads, head_dim, &q)?.view();
        let k = upload(kv_len, kv_heads, head_dim, &k)?.view();
        let v = upload(kv_len, kv_heads, value_dim, &v)?.view();
        let mask = Tensor::from_slice(gpu, &[1, 1, q_len, kv_len], &mask)?.view();
        // (A row of 16 bits begins on a whole word.)
        let padded = [batch, q_len, heads, value_dim.next_multiple_of(2)];
        let out = Tensor::empty(gpu, &padded, problem.out_type)?.view();
        let out = out.slice(3, 0..value_dim)?;
        let lse = Tensor::empty(gpu, &[batch, heads, q_len], ElementType::F32)?.view();
        // A driver that is wrong may be so with one size of a tile alone.
        let tier = problem.tier;
        let mut plans = problem.candidates(gpu.capabilities())?;
        plans.retain(|plan| Some(plan.kernel.tier(&plan.configuration)) == tier);
        let mut comparisons = Vec::new();
        for plan in plans {
            let attention = Attention::from_plan(gpu, problem.clone(), change(plan))?;
            let mut arguments = AttentionArguments {
                lse: Some(&lse),
                ..AttentionArguments::new(&q, &k, &v, &out)
            };
            arguments.rules.mask = self.masked.then_some(&mask);
            gpu.record_and_submit(|encoder| attention.encode(encoder, arguments))?;
            comparisons.extend(compared(&out, &lse, &expected).await?);
        }
        Ok(comparisons)
    }
}

/// An output and a log-sum-exp against those of the reference.
async fn compared(
    out: &TensorView,
    lse: &TensorView,
    expected: &reference::AttentionOutputs,
) -> Result<Vec<Comparison>> {
    let Tolerance { absolute, relative } = Tolerance::F32;
    let (got, tolerance) = match out.element_type() {
        ElementType::F32 => (out.read::<f32>().await?, Tolerance::F32),
        _ => {
            let got = out.read::<f16>().await?;
            let got = got.iter().map(|value| value.to_f32()).collect();
            // What rounding the output adds.
            (got, Tolerance::new(absolute, relative + 0.5f64.powi(11)))
        }
    };
    let got_lse = lse.read::<f32>().await?;
    let (shape, lse_shape) = (out.shape(), lse.shape());
    Ok(vec![
        compare(&got, shape, &expected.out, shape, tolerance),
        compare(
            &got_lse,
            lse_shape,
            &expected.lse,
            lse_shape,
            Tolerance::F32,
        ),
    ])
}
