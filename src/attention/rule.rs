//! A rule of the caller's own, in WGSL, linked into the same kernels as the built-in ones.

use crate::kernels::{self, Fragment, reflect};
use crate::{Error, Result};
use std::borrow::Cow;
use std::sync::Arc;

/// A rule in WGSL: a function `may_attend`, a function `score`, or both, and whatever they call.
///
/// ```wgsl
/// // Whether the query may see the key (besides all other rules).
/// fn may_attend(batch: u32, head: u32, query: u32, key: u32) -> bool
/// // What a score becomes, after scale, softcap, ALiBi and bias, before the softmax. A score that becomes
/// // -infinity hides the key.
/// fn score(score: f32, batch: u32, head: u32, query: u32, key: u32) -> f32
/// ```
///
/// `query` and `key` count from the first of the batch item (or packed sequence); `head` is the query's head. Both
/// may be called for pairs that another rule hides, and for queries past the end. `rule_data(i: u32) -> f32` reads
/// element i of the tensor `rule_data` that comes with each call.
///
/// The text is checked when the rule is made; kernels that differ in it never share a pipeline.
///
/// ```
/// use wgpu_attention::Rule;
///
/// // Each query sees the keys of its own block of 4.
/// let blocks = Rule::new("
///     fn may_attend(batch: u32, head: u32, query: u32, key: u32) -> bool {
///         return query / 4u == key / 4u;
///     }
/// ")?;
/// assert!(!blocks.reads_data());
/// let error = Rule::new("fn may_attend(query: u32) -> bool { return true; }").unwrap_err();
/// assert!(error.to_string().contains("may_attend"));
/// # Ok::<(), wgpu_attention::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Rule(Arc<Linked>);

#[derive(Debug, PartialEq, Eq, Hash)]
struct Linked {
    source: String,
    /// The rule's text, with what it leaves out.
    fragment: Fragment,
    reads_data: bool,
}

/// What a rule's function takes and gives.
const MAY_ATTEND: &str = "fn may_attend(batch: u32, head: u32, query: u32, key: u32) -> bool";
const SCORE: &str = "fn score(score: f32, batch: u32, head: u32, query: u32, key: u32) -> f32";

/// Stands in for the kernel when a rule is checked by itself. It comes after the rule's own text, so that lines
/// are those of the rule.
const AROUND: &str = "
@group(0) @binding(9)
var<storage, read> rule_values: array<f32>;

fn rule_data(index: u32) -> f32 {
    return rule_values[index];
}
";

impl Rule {
    /// Checks a rule's text.
    ///
    /// # Errors
    ///
    /// [`Error::Shader`] with naga's words and the line in this text; or with the name that is missing, takes
    /// other arguments, or is taken already.
    pub fn new(wgsl: impl Into<String>) -> Result<Self> {
        let source: String = wgsl.into();
        let refuse = |message: String| Error::Shader {
            kernel: "rule".into(),
            message,
        };
        // Before it is parsed: naga would say of a name that is there twice where the other one is, not which is whose.
        for (line, text) in source.lines().enumerate() {
            if let Some(name) = kernels::declared_name(text.trim_start()) {
                let given = ["rule_data", "rule_values"].contains(&name);
                let own = ["may_attend", "score"].contains(&name);
                if given || !own && kernels::declares(name) {
                    return Err(refuse(format!(
                        "line {}: the kernels declare `{name}` already; take another name",
                        line + 1
                    )));
                }
            }
        }
        let (module, _) = reflect::validate(&format!("{source}{AROUND}")).map_err(refuse)?;
        if !module.entry_points.is_empty() {
            return Err(refuse(
                "an entry point: a rule is functions that a kernel calls".into(),
            ));
        }
        if let Some((_, variable)) = module
            .global_variables
            .iter()
            .find(|(_, variable)| variable.name.as_deref() != Some("rule_values"))
        {
            return Err(refuse(format!(
                "the variable {:?}: a rule has no buffer or workgroup memory but `rule_data`",
                variable.name.as_deref().unwrap_or("")
            )));
        }
        // A rule is called where not all invocations of a workgroup come by.
        let words: Vec<&str> = kernels::words(&source).collect();
        if let Some(barrier) = words.iter().find(|word| word.ends_with("Barrier")) {
            return Err(refuse(format!("`{barrier}`: a rule may not synchronise")));
        }
        let mut found = [false; 2];
        for ((name, declaration), found) in [("may_attend", MAY_ATTEND), ("score", SCORE)]
            .into_iter()
            .zip(&mut found)
        {
            let Some((_, function)) = module
                .functions
                .iter()
                .find(|(_, function)| function.name.as_deref() == Some(name))
            else {
                continue;
            };
            *found = true;
            let scalar = |ty| match module.types[ty].inner {
                naga::TypeInner::Scalar(scalar) => Some(scalar),
                _ => None,
            };
            let takes: Vec<_> = function.arguments.iter().map(|a| scalar(a.ty)).collect();
            let gives = function.result.as_ref().and_then(|r| scalar(r.ty));
            let index = Some(naga::Scalar::U32);
            let expected = match name {
                "may_attend" => (vec![index; 4], Some(naga::Scalar::BOOL)),
                _ => (
                    [vec![Some(naga::Scalar::F32)], vec![index; 4]].concat(),
                    Some(naga::Scalar::F32),
                ),
            };
            if (takes, gives) != expected {
                return Err(refuse(format!(
                    "`{name}` takes or gives other types: expected `{declaration}`"
                )));
            }
        }
        if found == [false, false] {
            return Err(refuse(format!(
                "neither function is there: expected `{MAY_ATTEND}`, `{SCORE}`, or both"
            )));
        }
        let mut linked = source.clone();
        linked.push_str("\nconst RULED: bool = true;\n");
        if !found[0] {
            linked.push_str(&format!("{MAY_ATTEND} {{\n    return true;\n}}\n"));
        }
        if !found[1] {
            linked.push_str(&format!("{SCORE} {{\n    return score;\n}}\n"));
        }
        Ok(Rule(Arc::new(Linked {
            reads_data: words.contains(&"rule_data"),
            fragment: Fragment {
                name: Cow::Borrowed("rule"),
                source: Cow::Owned(linked),
            },
            source,
        })))
    }

    /// Its text.
    pub fn source(&self) -> &str {
        &self.0.source
    }

    /// Whether it calls `rule_data`, so that each call must come with the tensor.
    pub fn reads_data(&self) -> bool {
        self.0.reads_data
    }

    pub(super) fn fragment(&self) -> &Fragment {
        &self.0.fragment
    }
}
