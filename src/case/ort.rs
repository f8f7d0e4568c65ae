//! Cases of ONNX Runtime's own operators `MultiHeadAttention` and `GroupQueryAttention` (com.microsoft).

use super::Case;
use super::attention::{AttentionCase, CaseRotary, Layout, Operand, Output};
use super::host::Values;
use super::kind::{Kind, unsupported};
use crate::Result;
use crate::attention::{Alignment, AttentionRules};
use crate::tensor::shape_text;

pub(super) const ORT: Kind = Kind {
    names: &["ort"],
    attributes: &[
        "B",
        "D",
        "Dv",
        "Hkv",
        "Hq",
        "L",
        "S",
        "align",
        "causal",
        "do_rotary",
        "kv_num_heads",
        "lens",
        "local_window_size",
        "mask_kind",
        "num_heads",
        "op",
        "past",
        "rotary",
        "rotary_dim",
        "rotary_interleaved",
        "scale",
        "softcap",
        "unidirectional",
        "window_left",
    ],
    inputs: &[
        "query",
        "key",
        "value",
        "bias",
        "past_key",
        "past_value",
        "seqlens_k",
        "total_sequence_length",
        "cos_cache",
        "sin_cache",
        "head_sink",
        "attention_bias",
        "key_padding_mask",
    ],
    run: |case, selection, engine| read(case)?.run(selection, engine),
};

fn read(case: &Case) -> Result<AttentionCase> {
    let grouped = match case.attr_str("op")? {
        "com.microsoft.GroupQueryAttention" => true,
        "com.microsoft.MultiHeadAttention" => false,
        other => return Err(unsupported(other, "this operator is not understood")),
    };
    let heads = case.attr_usize("num_heads")?;
    let kv_heads = if grouped {
        case.attr_usize("kv_num_heads")?
    } else {
        heads
    };
    let operand = |name, heads| {
        let tensor = case.input(name)?;
        let layout = match tensor.shape.len() {
            4 => Layout::HeadsFirst,
            _ => Layout::SideBySide(heads),
        };
        Operand::new(case, tensor, layout)
    };
    let mut q = operand("query", heads)?;
    let mut k = operand("key", kv_heads)?;
    let mut v = operand("value", kv_heads)?;
    case.expect_sizes(&[
        ("B", q.shape[0]),
        ("S", q.shape[1]),
        ("L", k.shape[1]),
        ("D", q.shape[3]),
        ("Dv", v.shape[3]),
        ("Hq", heads),
        ("Hkv", kv_heads),
        ("kv_num_heads", kv_heads),
    ])?;
    if let Some(bias) = case.input_opt("bias") {
        // One vector of q, k and v, added to heads that lie side by side.
        let mut rest = &bias.values[..];
        for operand in [&mut q, &mut k, &mut v] {
            let channels = operand.shape[2] * operand.shape[3];
            let Some((own, others)) = rest.split_at_checked(channels) else {
                return Err(case.error(format!(
                    "input \"bias\": expected q, k and v side by side, got {}",
                    shape_text(&bias.shape)
                )));
            };
            operand.add(case, own)?;
            rest = others;
        }
        if !rest.is_empty() {
            return Err(case.error(format!("input \"bias\": {} values too many", rest.len())));
        }
    }

    let mut read = AttentionCase::new(case, q, k, v)?;
    let new = read.problem.kv_len;
    let past = read.read_past(case)?;
    let (batch, kv_len) = (read.problem.batch, read.problem.kv_len);
    case.expect_sizes(&[("past", past)])?;
    let mut lens = vec![kv_len; batch];
    if grouped {
        // Keys of each item in all, less 1; the new ones come last.
        lens = case.lengths_of("seqlens_k")?;
        lens.iter_mut().for_each(|len| *len += 1);
        let total = case.lengths_of("total_sequence_length")?;
        if lens.len() != batch || lens.iter().max() != total.first() {
            return Err(case.error(format!(
                "seqlens_k + 1 is {lens:?} and total_sequence_length {total:?}: expected {batch} lengths and the largest"
            )));
        }
        if lens.iter().any(|len| *len < new || *len > kv_len) {
            return Err(unsupported(
                format!("items of {lens:?} keys with {new} new ones behind {past}"),
                "the new keys of an item are expected behind those that it has",
            ));
        }
    }
    read.rotary = read_rotary(case, grouped, lens.iter().map(|len| len - new).collect())?;
    let full = lens.iter().all(|len| *len == kv_len);
    if let Some(past) = &mut read.past {
        past.kept = lens.iter().map(|len| len - new).collect();
    }
    read.outputs = vec![("Y", Output::Out), ("Y_f64", Output::Out)];
    if full {
        let present = [
            ("present_key", Output::PresentKey),
            ("present_value", Output::PresentValue),
        ];
        read.outputs.extend(present);
    } else {
        read.otherwise =
            "what lies behind the last key of a shorter item is the runtime's own".into();
        read.kv_lens = Some(lens);
    }

    let causal = case.attr_bool("causal")?;
    if case.choice("unidirectional", &[0, 1], usize::from(causal))? != usize::from(causal) {
        return Err(case.error("attributes `causal` and `unidirectional` contradict each other"));
    }
    let window_left = case.window("window_left")?;
    if let Some(keys) = case.window("local_window_size")? {
        // The runtime counts the query's own key.
        case.expect_sizes(&[("window_left", keys.saturating_sub(1))])?;
    }
    let has_scale = case.attributes.contains_key("scale");
    read.problem.rules = AttentionRules {
        scale: has_scale
            .then(|| case.attr_f64("scale"))
            .transpose()?
            .map(|scale| scale as f32),
        softcap: case.softcap()?,
        causal,
        // New tokens come last, where a case says nothing else.
        alignment: match case.attributes.contains_key("align") {
            true => Some(case.alignment()?),
            false => Some(Alignment::BottomRight),
        },
        window_left,
        ..Default::default()
    };
    read.sinks = case.input_opt("head_sink").map(Values::from);
    read.bias = case.input_opt("attention_bias").map(Values::from);
    let mask_kind = case
        .attributes
        .get("mask_kind")
        .map_or("none", String::as_str);
    if let Some(input) = case.input_opt("key_padding_mask") {
        let given = input.to_usize()?;
        let shown: Vec<bool> = match (mask_kind, &input.shape[..]) {
            // Keys of each item, from the first.
            ("key_lens_1d", &[_]) => given
                .iter()
                .flat_map(|len| (0..kv_len).map(move |key| key < *len))
                .collect(),
            ("key_padding_2d", &[_, keys]) if keys == kv_len => {
                given.iter().map(|value| *value != 0).collect()
            }
            (other, shape) => {
                return Err(unsupported(
                    format!("mask_kind {other:?} of shape {}", shape_text(shape)),
                    format!("key_lens_1d (B) and key_padding_2d (B, {kv_len}) are understood"),
                ));
            }
        };
        read.mask = Some(Values {
            shape: vec![batch, 1, 1, kv_len],
            values: shown.into_iter().map(f64::from).collect(),
        });
    } else if mask_kind != "none" {
        return Err(case.error(format!(
            "mask_kind {mask_kind:?}, but no input key_padding_mask"
        )));
    }
    Ok(read)
}

/// Rotary embedding of `GroupQueryAttention`, whose new tokens stand behind those that an item has: `starts`.
/// Past keys come turned. Tables are as wide as half the channels that turn.
fn read_rotary(case: &Case, grouped: bool, starts: Vec<usize>) -> Result<Option<CaseRotary>> {
    let said = case.attributes.get("rotary").map(String::as_str);
    let interleaved = case.choice("rotary_interleaved", &[0, 1], 0)? == 1;
    let [cos, sin] = ["cos_cache", "sin_cache"].map(|name| case.input_opt(name));
    if case.choice("do_rotary", &[0, 1], 0)? == 0 {
        if said.is_some_and(|said| said != "none") || cos.is_some() || sin.is_some() {
            return Err(unsupported(
                "a table of rotary embedding, or a word for it, where do_rotary is 0",
                "they contradict each other: expected do_rotary = 1, or neither",
            ));
        }
        return Ok(None);
    }
    if !grouped {
        return Err(unsupported(
            "do_rotary = 1 in com.microsoft.MultiHeadAttention",
            "that operator has none",
        ));
    }
    // In words what rotary_interleaved says: any other word is for halves.
    if said.is_some_and(|said| said == "none" || (said == "interleaved") != interleaved) {
        return Err(case.error(format!(
            "attributes `rotary` = {:?} and `rotary_interleaved` = {} contradict each other",
            said.unwrap_or_default(),
            u8::from(interleaved)
        )));
    }
    let (cos, sin) = (case.input("cos_cache")?, case.input("sin_cache")?);
    if cos.shape.len() != 2 || cos.shape != sin.shape {
        return Err(case.error(format!(
            "inputs \"cos_cache\" and \"sin_cache\": expected (positions, R/2) alike, got {} and {}",
            shape_text(&cos.shape),
            shape_text(&sin.shape)
        )));
    }
    let rotary = CaseRotary {
        interleaved,
        cos: Values::from(cos),
        sin: Values::from(sin),
        starts,
    };
    case.expect_sizes(&[("rotary_dim", rotary.dims())])?;
    Ok(Some(rotary))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::kind::{Engine, Selection};
    use super::*;
    use crate::tensor_file::{ElementKind, FileTensor};

    const BATCH: usize = 2;
    const NEW: usize = 3;
    const PAST: usize = 5;
    const HEADS: usize = 4;
    const KV_HEADS: usize = 2;
    const CHANNELS: usize = 6;
    /// Channels that turn.
    const TURNED: usize = 4;

    fn tensor(name: &str, shape: &[usize], frequency: f64) -> FileTensor {
        let count = shape.iter().product::<usize>();
        FileTensor {
            name: name.into(),
            dtype: ElementKind::F64,
            shape: shape.to_vec(),
            values: (0..count).map(|i| (i as f64 * frequency).sin()).collect(),
        }
    }

    fn whole(name: &str, values: &[usize]) -> FileTensor {
        FileTensor {
            name: name.into(),
            dtype: ElementKind::I32,
            shape: vec![values.len()],
            values: values.iter().map(|value| *value as f64).collect(),
        }
    }

    /// A step of three tokens on a cache of items with that many keys in all.
    fn step(lens: [usize; BATCH]) -> Case {
        let attributes = [
            ("op", "com.microsoft.GroupQueryAttention"),
            ("num_heads", "4"),
            ("kv_num_heads", "2"),
            ("causal", "true"),
            ("align", "bottom_right"),
        ];
        let past = [BATCH, KV_HEADS, PAST, CHANNELS];
        Case {
            file: "made up".into(),
            kind: "ort".into(),
            name: "step".into(),
            group: String::new(),
            attributes: attributes
                .map(|(name, value)| (name.to_string(), value.to_string()))
                .into(),
            metadata: Default::default(),
            inputs: vec![
                tensor("query", &[BATCH, NEW, HEADS * CHANNELS], 0.37),
                tensor("key", &[BATCH, NEW, KV_HEADS * CHANNELS], 0.83),
                tensor("value", &[BATCH, NEW, KV_HEADS * CHANNELS], 1.31),
                tensor("past_key", &past, 0.59),
                tensor("past_value", &past, 1.77),
                whole("seqlens_k", &lens.map(|len| len - 1)),
                whole("total_sequence_length", &[lens[0].max(lens[1])]),
            ],
            outputs: vec![tensor("Y", &[BATCH, NEW, HEADS * CHANNELS], 0.0)],
        }
    }

    fn angle(position: usize, pair: usize) -> f64 {
        position as f64 * (0.3 + 0.5 * pair as f64)
    }

    fn with_rotary(mut case: Case, interleaved: bool) -> Case {
        let word = if interleaved { "interleaved" } else { "half" };
        for (name, value) in [
            ("do_rotary", "1"),
            ("rotary_interleaved", if interleaved { "1" } else { "0" }),
            ("rotary", word),
            ("rotary_dim", "4"),
        ] {
            case.attributes.insert(name.into(), value.into());
        }
        for (name, function) in [
            ("cos_cache", f64::cos as fn(f64) -> f64),
            ("sin_cache", f64::sin),
        ] {
            let mut table = tensor(name, &[PAST + NEW, TURNED / 2], 0.0);
            for (at, value) in table.values.iter_mut().enumerate() {
                *value = function(angle(at / (TURNED / 2), at % (TURNED / 2)));
            }
            case.inputs.push(table);
        }
        case
    }

    /// The queries and new keys of a case, turned here.
    fn turned(mut case: Case, interleaved: bool, starts: [usize; BATCH]) -> Case {
        for (input, heads) in [(0, HEADS), (1, KV_HEADS)] {
            for (row, head) in case.inputs[input].values.chunks_mut(CHANNELS).enumerate() {
                let token = row / heads;
                let position = starts[token / NEW] + token % NEW;
                for pair in 0..TURNED / 2 {
                    let [a, b] = match interleaved {
                        true => [2 * pair, 2 * pair + 1],
                        false => [pair, TURNED / 2 + pair],
                    };
                    let (sin, cos) = angle(position, pair).sin_cos();
                    (head[a], head[b]) =
                        (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
                }
            }
        }
        case
    }

    fn run(case: &Case) -> Vec<(&'static str, Vec<f64>)> {
        let read = read(case).unwrap();
        let computed = read.run(&Selection::Forward, &Engine::Reference).unwrap();
        let named = computed.outputs.into_iter();
        named.map(|(name, values, _)| (name, values)).collect()
    }

    #[test]
    fn new_tokens_are_turned_by_their_place_behind_the_past() {
        // Both items keep their whole past, or the second keeps three of its five.
        for (lens, outputs) in [([8, 8], 4), ([8, 6], 2)] {
            let starts = lens.map(|len| len - NEW);
            let plain = run(&step(lens));
            for interleaved in [false, true] {
                let found = run(&with_rotary(step(lens), interleaved));
                let expected = run(&turned(step(lens), interleaved, starts));
                assert_eq!(found.len(), outputs);
                for ((name, found), (_, expected)) in found.iter().zip(&expected) {
                    assert_eq!(found.len(), expected.len(), "{name}");
                    for (found, expected) in found.iter().zip(expected) {
                        assert!(
                            (found - expected).abs() < 1e-13,
                            "{name} of {lens:?}, interleaved {interleaved}: {found} is not {expected}"
                        );
                    }
                }
                assert_ne!(found[0], plain[0], "turning makes a difference");
            }
        }
    }

    #[test]
    fn rotary_that_contradicts_itself_is_refused() {
        let good = with_rotary(step([8, 8]), true);
        let refused = |change: &dyn Fn(&mut Case)| {
            let mut case = good.clone();
            change(&mut case);
            let computed =
                read(&case).and_then(|read| read.run(&Selection::Forward, &Engine::Reference));
            computed.err().map(|error| error.to_string())
        };
        assert_eq!(refused(&|_| ()), None);
        let set = |name: &'static str, value: &'static str| {
            refused(&move |case| {
                case.attributes.insert(name.into(), value.into());
            })
        };
        for (name, value, said) in [
            ("rotary", "none", "contradict"),
            ("rotary", "half", "contradict"),
            ("rotary_interleaved", "0", "contradict"),
            ("rotary_interleaved", "2", "one of [0, 1]"),
            ("do_rotary", "0", "contradict"),
            ("rotary_dim", "6", "4 as the inputs have"),
        ] {
            let found = set(name, value).unwrap_or_default();
            assert!(found.contains(said), "{name} = {value}: {found:?}");
        }
        let without = |name: &'static str| {
            refused(&move |case| case.inputs.retain(|input| input.name != name))
        };
        assert!(without("cos_cache").unwrap().contains("cos_cache"));
        assert!(without("sin_cache").unwrap().contains("sin_cache"));
        // Position 7 is beyond tables of seven rows; tables must be alike.
        let positions = |rows: [usize; 2]| {
            refused(&move |case| {
                let tables = case.inputs.iter_mut().rev();
                for (table, rows) in tables.zip(rows) {
                    table.values.resize(rows * TURNED / 2, 1.0);
                    table.shape[0] = rows;
                }
            })
        };
        assert_eq!(positions([9, 9]), None);
        assert!(positions([7, 7]).unwrap().contains("8 positions"));
        assert!(positions([9, 8]).unwrap().contains("alike"));
    }
}
