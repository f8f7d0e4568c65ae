//! Projections that write keys and values straight into a cache: every place of the cache is held against the rules, those
//! that must keep what they held included.
// A test that cannot go on says so by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use support::check::*;
use support::{Guarded, Random, SENTINEL, run};
use wgpu_attention::kernels::{Form, Fragment, STORE_CACHE};
use wgpu_attention::{
    CacheArguments, CacheColumns, ElementType, Error, Gpu, Linear, LinearArguments, LinearProblem,
    Tensor, TensorView, reference,
};

/// A kernel: its form, and whether it is the one for few rows.
const KERNELS: [(Form, bool); 4] = [
    (Form::Lanes, false),
    (Form::Tiled, false),
    (Form::Lanes, true),
    (Form::Tiled, true),
];

const TYPES: [ElementType; 3] = [ElementType::F32, ElementType::F16, ElementType::BF16];

#[derive(Clone, Debug)]
struct Case {
    batch: usize,
    tokens: usize,
    q_columns: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
    element_type: ElementType,
    capacity: usize,
    page_size: Option<usize>,
    /// Pages of the pool.
    pages: usize,
    lengths: Vec<u32>,
    counts: Option<Vec<u32>>,
    block_table: Vec<u32>,
}

const D_IN: usize = 11;

impl Case {
    /// Three items, one of which is past the capacity and one of which has fewer tokens than are new.
    fn new(element_type: ElementType) -> Self {
        Case {
            batch: 3,
            tokens: 5,
            q_columns: 12,
            kv_heads: 3,
            head_dim: 6,
            value_dim: 4,
            element_type,
            capacity: 9,
            page_size: None,
            pages: 0,
            lengths: vec![7, 11, 2],
            counts: None,
            block_table: Vec::new(),
        }
    }

    /// The same in pages of 4: one is not in the pool, and one word is as large as words are.
    fn paged(self) -> Self {
        Case {
            page_size: Some(4),
            pages: 6,
            block_table: vec![5, 0, 9, 2, u32::MAX, 3, 1, 9, 9],
            ..self
        }
    }

    fn columns(&self) -> CacheColumns {
        CacheColumns {
            q_columns: self.q_columns,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            value_dim: self.value_dim,
            element_type: self.element_type,
            page_size: self.page_size,
            capacity: self.capacity,
        }
    }

    fn problem(&self, (form, few): (Form, bool)) -> LinearProblem {
        LinearProblem {
            batch: self.batch,
            tokens: self.tokens,
            d_in: D_IN,
            d_out: self.q_columns + self.kv_heads * (self.head_dim + self.value_dim),
            form: Some(form),
            few: Some(few),
        }
    }

    /// Where each token of each item goes: batch item (or 0) and row, as plainly as it can be said.
    fn places(&self) -> Vec<Option<(usize, usize)>> {
        let mut places = Vec::new();
        for item in 0..self.batch {
            let count = match &self.counts {
                Some(counts) => i64::from(counts[item]),
                None => self.tokens as i64,
            };
            for token in 0..self.tokens as i64 {
                let position = i64::from(self.lengths[item]) - count + token;
                let inside = (0..self.capacity as i64).contains(&position) && token < count;
                let position = position as usize;
                places.push(match self.page_size {
                    _ if !inside => None,
                    None => Some((item, position)),
                    Some(size) => {
                        let width = self.capacity.div_ceil(size);
                        let page = self.block_table[item * width + position / size] as usize;
                        (page < self.pages).then_some((0, page * size + position % size))
                    }
                });
            }
        }
        places
    }

    /// Batch items (or one pool) and rows of the cache.
    fn rows(&self) -> (usize, usize) {
        match self.page_size {
            None => (self.batch, self.capacity),
            Some(size) => (1, self.pages * size),
        }
    }

    /// A cache full of what nobody wrote, with a head more than there are, and the view that is given away. Pages lie head by head, so that a
    /// row behind those of one head is of the next, and not somewhere that checks of indices keep from being written.
    fn cache(&self, gpu: &Gpu, dim: usize) -> (Guarded, TensorView) {
        let heads = self.kv_heads + 1;
        let shape = match self.page_size {
            None => [self.batch, self.capacity, heads, dim],
            Some(size) => [heads, self.pages, size, dim],
        };
        let guarded = Guarded::typed(gpu, &shape, self.element_type);
        let view = guarded.tensor.view();
        let view = match self.page_size {
            None => view,
            Some(_) => permuted(&view, &[1, 2, 0, 3]),
        };
        (guarded, sliced(&view, 2, 1..heads))
    }

    /// Runs the kernel with these fragments in place of those of the same names, and checks y and all of the cache.
    fn check(&self, gpu: &Gpu, kernel: (Form, bool), changed: &[Fragment]) -> Result<(), String> {
        let words = |error: Error| error.to_string();
        let problem = self.problem(kernel);
        let columns = self.columns();
        let mut plan = problem
            .plan_into_cache(gpu.capabilities(), &columns)
            .map_err(words)?;
        for rule in &mut plan.configuration.rules {
            if let Some(other) = changed.iter().find(|other| other.name == rule.name) {
                *rule = other.clone();
            }
        }
        let linear = Linear::into_cache_from_plan(gpu, problem, columns, plan).map_err(words)?;

        let mut random = Random::new(5);
        let rows = self.batch * self.tokens;
        let [x, weight, bias] =
            [rows * D_IN, problem.d_out * D_IN, problem.d_out].map(|count| random.normals(count));
        let expected = reference::linear(
            &reference::widen(&x),
            rows,
            D_IN,
            &reference::widen(&weight),
            Some(&reference::widen(&bias)),
            problem.d_out,
        )
        .unwrap();
        let x = place(gpu, &[self.batch, self.tokens, D_IN], &x, |view| view);
        let weight = place(gpu, &[problem.d_out, D_IN], &weight, |view| view);
        let bias = place(gpu, &[problem.d_out], &bias, |view| view);
        let y = Guarded::new(gpu, &[self.batch, self.q_columns, self.tokens]);
        let (k_cache, k) = self.cache(gpu, self.head_dim);
        let (v_cache, v) = self.cache(gpu, self.value_dim);
        // In an order of their own, with a word between them.
        let mut tables = vec![77];
        tables.extend(&self.block_table);
        tables.push(77);
        let counts_at = tables.len();
        tables.extend(self.counts.iter().flatten());
        let lengths_at = tables.len();
        tables.extend(&self.lengths);
        let tables = Tensor::from_slice(gpu, &[tables.len()], &tables).map_err(words)?;
        let table = |from: usize, count: usize| sliced(&tables.view(), 0, from..from + count);
        let lengths = table(lengths_at, self.batch);
        let counts = self.counts.as_ref().map(|_| table(counts_at, self.batch));
        let block_table = self.page_size.map(|size| {
            let width = self.capacity.div_ceil(size);
            split(&table(1, self.block_table.len()), 0, &[self.batch, width])
        });
        let y_view = permuted(&y.tensor.view(), &[0, 2, 1]);
        let mut recorded = Ok(());
        run(gpu, |encoder| {
            let arguments = LinearArguments {
                x: &x,
                weight: &weight,
                bias: Some(&bias),
                y: &y_view,
            };
            let cache = CacheArguments {
                k: &k,
                v: &v,
                lengths: &lengths,
                counts: counts.as_ref(),
                block_table: block_table.as_ref(),
            };
            recorded = linear.encode_into_cache(encoder, arguments, cache, "test", None);
        });
        recorded.map_err(words)?;

        // Columns of every row.
        let part = |from: usize, count: usize| -> Vec<f64> {
            let rows = expected.chunks(problem.d_out);
            rows.flat_map(|row| row[from..from + count].to_vec())
                .collect()
        };
        let got = read_output(&y, &y_view)?;
        let shape = [self.batch, self.tokens, self.q_columns];
        matches(&got, &part(0, self.q_columns), &shape).map_err(|error| format!("y: {error}"))?;
        let key_columns = self.kv_heads * self.head_dim;
        let keys = part(self.q_columns, key_columns);
        let values = part(self.q_columns + key_columns, self.kv_heads * self.value_dim);
        self.check_cache(&k_cache, &keys, self.head_dim)
            .map_err(|error| format!("k: {error}"))?;
        self.check_cache(&v_cache, &values, self.value_dim)
            .map_err(|error| format!("v: {error}"))
    }

    /// Every element of the buffer: what was written where the rules say, and what nobody wrote elsewhere.
    fn check_cache(&self, cache: &Guarded, expected: &[f64], dim: usize) -> Result<(), String> {
        let (items, rows) = self.rows();
        let heads = self.kv_heads + 1;
        let count = items * rows * heads * dim;
        let mut right: Vec<Option<f64>> = vec![None; count];
        for (row, place) in self.places().into_iter().enumerate() {
            let Some((item, at)) = place else { continue };
            for column in 0..self.kv_heads * dim {
                let (head, channel) = (column / dim + 1, column % dim);
                let element = match self.page_size {
                    None => (item * rows + at) * heads + head,
                    Some(_) => head * rows + at,
                };
                let element = element * dim + channel;
                right[element] = Some(expected[row * self.kv_heads * dim + column]);
            }
        }
        let got = cache.bits(self.element_type)?;
        if got.len() < count {
            return Err(format!("{} elements, not {count}", got.len()));
        }
        // One rounding to the cache's type, of a value that is off by a little itself.
        let rounding = match self.element_type {
            ElementType::F16 => 2f64.powi(-11),
            ElementType::BF16 => 2f64.powi(-8),
            _ => 0.0,
        };
        for (at, right) in right.into_iter().enumerate() {
            let (bits, value) = got[at];
            match right {
                None if bits == untouched(self.element_type) => {}
                None => return Err(format!("element {at} was written: {value}")),
                Some(right) => {
                    let allowed = 1e-5 + (1e-4 + rounding) * right.abs();
                    let error = (f64::from(value) - right).abs();
                    if error.is_nan() || error > allowed {
                        return Err(format!("element {at} is {value}, expected {right}"));
                    }
                }
            }
        }
        Ok(())
    }
}

/// The bits of an element that nobody wrote.
fn untouched(element_type: ElementType) -> u32 {
    SENTINEL >> (32 - 8 * element_type.size() as u32)
}

/// Everything that decides where a token goes, for every type.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for element_type in TYPES {
        let case = Case::new(element_type);
        cases.push(case.clone());
        cases.push(case.clone().paged());
        // Fewer new tokens than x has, none, and more than the item holds.
        let counted = Case {
            counts: Some(vec![3, 0, 4]),
            ..case.clone()
        };
        cases.push(counted.clone());
        cases.push(counted.paged());
        // Lengths that no cache has.
        cases.push(Case {
            lengths: vec![u32::MAX, 1 << 31, 0],
            ..case.clone()
        });
        // Counts that no x has: nothing before the beginning is a place.
        cases.push(Case {
            counts: Some(vec![u32::MAX, 6, 5]),
            lengths: vec![0, 7, 2],
            ..case.clone()
        });
        // No queries; one head; heads wider than a tile.
        cases.push(Case {
            q_columns: 0,
            ..case.clone()
        });
        cases.push(Case {
            kv_heads: 1,
            head_dim: 38,
            value_dim: 70,
            q_columns: 38,
            ..case.clone()
        });
        // One token, as in decoding; and more rows than a tile of few.
        cases.push(Case {
            tokens: 1,
            lengths: vec![1, 9, 4],
            ..case.clone().paged()
        });
        cases.push(Case {
            tokens: 23,
            capacity: 30,
            lengths: vec![23, 30, 25],
            ..case
        });
    }
    // Odd sizes, where a pair of columns is of q and k, of two heads, of k and v.
    cases.push(Case {
        q_columns: 7,
        kv_heads: 2,
        head_dim: 3,
        value_dim: 5,
        ..Case::new(ElementType::F32)
    });
    cases
}

#[test]
fn keys_and_values_go_to_their_places_and_nothing_else_is_written() {
    let Some(gpu) = gpu() else { return };
    let mut failures = Failures::default();
    for case in cases() {
        for kernel in KERNELS {
            let result = case.check(&gpu, kernel, &[]);
            failures.note(format!("{kernel:?} {case:?}"), result);
        }
    }
    failures.report(100);
}

/// What is broken, in which fragment, which text, and what stands there instead.
type Mutant = (&'static str, &'static str, &'static str, &'static str);

const ROW: &str = "shared/cache_row";
const CACHE: &str = "rules/cache";

static MUTANTS: &[Mutant] = &[
    (
        "past the capacity",
        ROW,
        "position < params.capacity",
        "true",
    ),
    (
        "one place late",
        ROW,
        "length - (count - token)",
        "length - (count - token) + 1u",
    ),
    (
        "counts ignored",
        ROW,
        "params.counts_at != ALL_TOKENS",
        "false",
    ),
    ("tokens that are not new", ROW, "token < count && ", ""),
    (
        "before the beginning",
        ROW,
        "count - token <= length",
        "true",
    ),
    (
        "the last new token left out",
        ROW,
        "token < count &&",
        "token + 1u < count &&",
    ),
    (
        "lengths of the first item",
        ROW,
        "params.lengths_at + batch",
        "params.lengths_at",
    ),
    (
        "counts of the first item",
        ROW,
        "params.counts_at + batch",
        "params.counts_at",
    ),
    (
        "block table of the first item",
        ROW,
        "batch * params.block_table_stride",
        "0u",
    ),
    (
        "pages in order",
        ROW,
        "tables[params.block_table_at + batch * params.block_table_stride + position / params.page_size]",
        "position / params.page_size",
    ),
    (
        "a page that is not there",
        ROW,
        "page < params.cache_rows / params.page_size",
        "true",
    ),
    (
        "the last page left out",
        ROW,
        "page < params.cache_rows",
        "page + 1u < params.cache_rows",
    ),
    (
        "the place within a page ignored",
        ROW,
        " + position % params.page_size;",
        ";",
    ),
    (
        "batch stride of k ignored",
        CACHE,
        "place.batch * params.k_batch_stride",
        "0u",
    ),
    (
        "batch stride of v ignored",
        CACHE,
        "place.batch * params.v_batch_stride",
        "0u",
    ),
    (
        "token stride of k",
        CACHE,
        "place.row * params.k_token_stride",
        "place.row * params.kv_heads * params.head_dim",
    ),
    (
        "token stride of v",
        CACHE,
        "place.row * params.v_token_stride",
        "place.row * params.kv_heads * params.value_dim",
    ),
    (
        "head stride of k ignored",
        CACHE,
        "key / params.head_dim * params.k_head_stride + ",
        "",
    ),
    (
        "head stride of v ignored",
        CACHE,
        "value / params.value_dim * params.v_head_stride + ",
        "",
    ),
    ("offset of k ignored", CACHE, "params.k_offset + ", ""),
    ("offset of v ignored", CACHE, "params.v_offset + ", ""),
    (
        "places that are not there",
        CACHE,
        "else if (row.cached)",
        "else",
    ),
    (
        "values beside the keys",
        CACHE,
        "let value = key - keys;",
        "let value = key;",
    ),
    (
        "halves exchanged",
        CACHE,
        "half_bits(values.x, params.cache_type) | half_bits(values.y, params.cache_type) << 16u",
        "half_bits(values.y, params.cache_type) | half_bits(values.x, params.cache_type) << 16u",
    ),
    (
        "second half lost",
        CACHE,
        " | half_bits(values.y, params.cache_type) << 16u",
        "",
    ),
    (
        "second column lost",
        CACHE,
        "(params.cache_type == F32 || column < params.q_columns)",
        "column < params.q_columns",
    ),
    (
        "second column of a word",
        CACHE,
        "both && (params.cache_type == F32 || column < params.q_columns)",
        "both",
    ),
    (
        "columns of y by one",
        CACHE,
        "column * params.y_channel_stride",
        "column",
    ),
];

#[test]
fn broken_stores_are_rejected() {
    let Some(gpu) = gpu() else { return };
    let mut failures = Failures::default();
    let kernel = (Form::Lanes, true);
    let cases = cases();
    let plan = cases[0]
        .problem(kernel)
        .plan_into_cache(gpu.capabilities(), &cases[0].columns())
        .unwrap();
    for (name, file, from, to) in MUTANTS {
        let rules = &plan.configuration.rules;
        let fragment = rules.iter().find(|rule| rule.name == *file).unwrap();
        assert_eq!(fragment.source.matches(from).count(), 1, "{name}: `{from}`");
        let broken = Fragment {
            name: fragment.name.clone(),
            source: fragment.source.replace(from, to).into(),
        };
        // One that does not compile would be rejected for the wrong reason.
        let mut compiled = plan.clone();
        for rule in &mut compiled.configuration.rules {
            if rule.name == broken.name {
                *rule = broken.clone();
            }
        }
        let (problem, columns) = (cases[0].problem(kernel), cases[0].columns());
        Linear::into_cache_from_plan(&gpu, problem, columns, compiled).unwrap();
        let changed = [broken];
        let rejected = cases
            .iter()
            .any(|case| case.check(&gpu, kernel, &changed).is_err());
        let result = if rejected {
            Ok(())
        } else {
            Err("not rejected".into())
        };
        failures.note(name, result);
    }
    failures.report(MUTANTS.len());
}

/// What cannot be written is refused before anything is recorded.
#[test]
fn what_does_not_fit_a_cache_is_refused() {
    let Some(gpu) = gpu() else { return };
    let kernel = (Form::Lanes, false);
    let planned = |case: &Case, columns: CacheColumns| {
        let problem = case.problem(kernel);
        problem
            .plan_into_cache(gpu.capabilities(), &columns)
            .map(drop)
            .map_err(|error| error.to_string())
    };
    let case = Case::new(ElementType::F16);
    let right = case.columns();
    assert_eq!(planned(&case, right), Ok(()));
    let wrong = [
        (
            "d_out",
            CacheColumns {
                q_columns: 14,
                ..right
            },
        ),
        (
            "d_out",
            CacheColumns {
                kv_heads: usize::MAX,
                ..right
            },
        ),
        (
            "kv_heads",
            CacheColumns {
                kv_heads: 0,
                ..right
            },
        ),
        (
            "page_size",
            CacheColumns {
                page_size: Some(0),
                ..right
            },
        ),
        (
            "capacity",
            CacheColumns {
                capacity: usize::MAX,
                ..right
            },
        ),
        (
            "element_type",
            CacheColumns {
                element_type: ElementType::U32,
                ..right
            },
        ),
    ];
    for (word, columns) in wrong {
        let refused = planned(&case, columns).unwrap_err();
        assert!(
            refused.contains(word) || word == "d_out",
            "{word}: {refused}"
        );
    }
    let odd = Case {
        head_dim: 5,
        ..case.clone()
    };
    let refused = planned(&odd, odd.columns()).unwrap_err();
    assert!(refused.contains("even"), "{refused}");

    // Operands that do not fit the plan.
    let linear = Linear::into_cache(&gpu, case.problem(kernel), right).unwrap();
    let x = Tensor::empty(&gpu, &[3, 5, D_IN], ElementType::F32).unwrap();
    let weight = Tensor::empty(&gpu, &[42, D_IN], ElementType::F32).unwrap();
    let y = Tensor::empty(&gpu, &[3, 5, 12], ElementType::F32).unwrap();
    let k = Tensor::empty(&gpu, &[3, 9, 3, 6], ElementType::F16).unwrap();
    let v = Tensor::empty(&gpu, &[3, 9, 3, 4], ElementType::F16).unwrap();
    let wide = Tensor::empty(&gpu, &[3, 9, 3, 6], ElementType::F32).unwrap();
    let odd = Tensor::empty(&gpu, &[3, 9, 3, 7], ElementType::F16).unwrap();
    let [lengths, elsewhere] = [0, 1].map(|_| Tensor::from_slice(&gpu, &[3], &[5u32; 3]).unwrap());
    let table = Tensor::from_slice(&gpu, &[3, 1], &[0u32; 3]).unwrap();
    let (x, weight, y) = (x.view(), weight.view(), y.view());
    let (k, v, wide) = (k.view(), v.view(), wide.view());
    let odd = sliced(&odd.view(), 3, 0..6);
    let (lengths, elsewhere, table) = (lengths.view(), elsewhere.view(), table.view());
    let right = CacheArguments {
        k: &k,
        v: &v,
        lengths: &lengths,
        counts: None,
        block_table: None,
    };
    let arguments = LinearArguments {
        x: &x,
        weight: &weight,
        bias: None,
        y: &y,
    };
    let tried = |cache: CacheArguments<'_>| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        linear
            .encode_into_cache(&mut encoder, arguments, cache, "test", None)
            .map_err(|error| error.to_string())
    };
    assert_eq!(tried(right), Ok(()));
    let wrong = [
        ("k", CacheArguments { k: &wide, ..right }),
        ("k", CacheArguments { k: &odd, ..right }),
        ("k", CacheArguments { k: &v, ..right }),
        ("v", CacheArguments { v: &k, ..right }),
        (
            "counts",
            CacheArguments {
                counts: Some(&elsewhere),
                ..right
            },
        ),
        (
            "counts",
            CacheArguments {
                counts: Some(&table),
                ..right
            },
        ),
        (
            "block_table",
            CacheArguments {
                block_table: Some(&table),
                ..right
            },
        ),
        (
            "lengths",
            CacheArguments {
                lengths: &x,
                ..right
            },
        ),
    ];
    for (word, cache) in wrong {
        let refused = tried(cache).unwrap_err();
        assert!(refused.contains(word), "{word}: {refused}");
    }
    // Each kind of plan is encoded its own way.
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    assert!(linear.encode(&mut encoder, arguments).is_err());
    let plain = Linear::new(&gpu, case.problem(kernel)).unwrap();
    assert!(
        plain
            .encode_into_cache(&mut encoder, arguments, right, "test", None)
            .is_err()
    );
    assert!(linear.plan().configuration.rules.contains(&STORE_CACHE));
}
