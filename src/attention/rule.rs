//! A rule of the caller's own, in WGSL, linked into the same kernels as the built-in ones.

use crate::kernels::{self, Fragment, Operation, RULE_DATA, reflect};
use crate::{Error, Result};
use naga::{Block, Statement};
use std::borrow::Cow;
use std::collections::HashSet;
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
/// The text is checked when the rule is made; kernels that differ in it never share a pipeline. Other functions,
/// constants and structs of its own may have any names. A rule with a loop is refused by the planner on adapters that
/// end loops early (Mesa's llvmpipe and lavapipe).
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
    loops: bool,
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
    /// [`Error::Shader`] with naga's words and the line in this text, or with what is missing or has no place in a rule.
    pub fn new(wgsl: impl Into<String>) -> Result<Self> {
        let source: String = wgsl.into();
        let refuse = |message: String| Error::Shader {
            kernel: "rule".into(),
            message,
        };
        let (module, info) = reflect::validate(&format!("{source}{AROUND}")).map_err(refuse)?;
        if !module.entry_points.is_empty() {
            return Err(refuse(
                "an entry point: a rule is functions that a kernel calls".into(),
            ));
        }
        let mut data = None;
        for (handle, variable) in module.global_variables.iter() {
            if variable.name.as_deref() != Some("rule_values") {
                return Err(refuse(format!(
                    "the variable {:?}: a rule has no buffer or memory of its own but `rule_data`",
                    variable.name.as_deref().unwrap_or("")
                )));
            }
            data = Some(handle);
        }
        let mut found = [false; 2];
        let mut reads_data = false;
        for ((name, declaration), found) in [("may_attend", MAY_ATTEND), ("score", SCORE)]
            .into_iter()
            .zip(&mut found)
        {
            let named = |function: &naga::Function| function.name.as_deref() == Some(name);
            let Some((handle, function)) = module.functions.iter().find(|(_, f)| named(f)) else {
                continue;
            };
            *found = true;
            // Through whatever it calls.
            reads_data |= data.is_some_and(|data| !info[handle][data].is_empty());
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
        // A rule is called where not all invocations of a workgroup come by.
        let synchronises = |statement: &Statement| {
            matches!(
                statement,
                Statement::ControlBarrier(_) | Statement::MemoryBarrier(_)
            )
        };
        let loops = |statement: &Statement| matches!(statement, Statement::Loop { .. });
        let some = |test: &dyn Fn(&Statement) -> bool| {
            let mut bodies = module.functions.iter().map(|(_, function)| &function.body);
            bodies.any(|body| holds(body, test))
        };
        if some(&synchronises) {
            return Err(refuse("a barrier: a rule may not synchronise".into()));
        }
        let mut linked = renamed(&source, &module).map_err(refuse)?;
        linked.push_str("\nconst RULED: bool = true;\nconst UNRULED: u32 = 0u;\n");
        if !found[0] {
            linked.push_str(&format!("{MAY_ATTEND} {{\n    return true;\n}}\n"));
        }
        if !found[1] {
            linked.push_str(&format!("{SCORE} {{\n    return score;\n}}\n"));
        }
        let rule = Rule(Arc::new(Linked {
            reads_data,
            loops: some(&loops),
            fragment: Fragment {
                name: Cow::Borrowed("rule"),
                source: Cow::Owned(linked),
            },
            source,
        }));
        rule.check_linked().map_err(refuse)?;
        Ok(rule)
    }

    /// Whether it is sound within a kernel, too: not all that a function may do has a place in a compute shader.
    fn check_linked(&self) -> Result<(), String> {
        let mut kernels = kernels::KERNELS.iter();
        let kernel = kernels.find(|kernel| kernel.operation == Operation::Attention);
        let Some(kernel) = kernel else { return Ok(()) };
        let Some(mut configuration) = (kernel.configurations)().into_iter().next() else {
            return Ok(());
        };
        configuration.rules.retain(|rule| *rule != kernels::NO_RULE);
        configuration.rules.push(self.fragment().clone());
        configuration.rules.push(RULE_DATA.clone());
        let text = kernel
            .assemble(&configuration)
            .map_err(|error| error.to_string())?;
        reflect::validate(&text).map(drop)
    }

    /// Its text.
    pub fn source(&self) -> &str {
        &self.0.source
    }

    /// Whether it calls `rule_data`, so that each call must come with the tensor.
    pub fn reads_data(&self) -> bool {
        self.0.reads_data
    }

    /// Whether it holds a loop.
    pub(super) fn loops(&self) -> bool {
        self.0.loops
    }

    pub(crate) fn fragment(&self) -> &Fragment {
        &self.0.fragment
    }
}

/// Whether a statement in a block, at any depth, is such a one.
fn holds(block: &Block, test: &dyn Fn(&Statement) -> bool) -> bool {
    block.iter().any(|statement| {
        test(statement)
            || match statement {
                Statement::Block(inner) => holds(inner, test),
                Statement::If { accept, reject, .. } => holds(accept, test) || holds(reject, test),
                Statement::Switch { cases, .. } => cases.iter().any(|case| holds(&case.body, test)),
                Statement::Loop {
                    body, continuing, ..
                } => holds(body, test) || holds(continuing, test),
                _ => false,
            }
    })
}

/// The rule's text with every name that it declares for the whole module changed to one that no kernel and no built-in
/// function has: a rule's own `exp` is not the kernel's.
fn renamed(source: &str, module: &naga::Module) -> Result<String, String> {
    let constants = module.constants.iter().map(|(_, c)| c.name.as_deref());
    let overrides = module.overrides.iter().map(|(_, o)| o.name.as_deref());
    let functions = module.functions.iter().map(|(_, f)| f.name.as_deref());
    let types = module.types.iter().map(|(_, t)| t.name.as_deref());
    let mut own: HashSet<&str> = constants
        .chain(overrides)
        .chain(functions)
        .chain(types)
        .flatten()
        .collect();
    // An alias, and a constant without a type, leave no trace in the module.
    let words: Vec<&str> = kernels::words(source).collect();
    let solid: Vec<&str> = words
        .iter()
        .copied()
        .filter(|w| !w.trim().is_empty())
        .collect();
    own.extend(
        solid
            .windows(2)
            .filter(|pair| ["alias", "const"].contains(&pair[0]))
            .map(|pair| pair[1]),
    );
    for given in ["may_attend", "score", "rule_data"] {
        own.remove(given);
    }
    let members = module.types.iter().filter_map(|(_, ty)| match &ty.inner {
        naga::TypeInner::Struct { members, .. } => Some(members),
        _ => None,
    });
    if let Some(clash) = members
        .flatten()
        .filter_map(|member| member.name.as_deref())
        .find(|name| own.contains(name))
    {
        return Err(format!(
            "`{clash}` is a member of a struct and a name of its own: rename one of them"
        ));
    }
    // The mark that has loops written out is for the kernels' own text.
    let mut text = String::with_capacity(source.len());
    for word in words {
        // `point.x` is a member, not the constant `x`.
        if own.contains(word) && !text.ends_with('.') {
            text.push_str("own_");
        }
        text.push_str(word);
    }
    Ok(text.replace("@unroll", "unroll"))
}
