//! From a script that violates a guarantee to a shorter one that violates the same.

use crate::report::Violation;
use crate::script::{Script, Timed};
use crate::{Sabotage, run};

/// Leaves steps out, in portions that get smaller, as long as the same guarantee is violated;
/// `runs` bounds how often that is tried.
#[must_use]
pub fn shrink(script: &Script, sabotage: Option<Sabotage>, runs: usize) -> (Script, Violation) {
    let (_, violation) = run(script, sabotage);
    let mut violation = violation.expect("what is shrunk violates a guarantee");
    let mut shortest = script.clone();
    let mut left = runs;
    // What comes after the violation had no part in it, unless it showed at the very end.
    let mut portion = shortest.steps.len().div_ceil(2).max(1);
    loop {
        let mut changed = false;
        let mut first = 0;
        while first < shortest.steps.len() && left > 0 {
            left -= 1;
            let end = (first + portion).min(shortest.steps.len());
            let candidate = Script {
                config: shortest.config.clone(),
                steps: without(&shortest.steps, first, end),
            };
            match run(&candidate, sabotage).1 {
                Some(other) if other.guarantee == violation.guarantee => {
                    violation = other;
                    shortest = candidate;
                    changed = true;
                }
                _ => first = end,
            }
        }
        if left == 0 || (portion == 1 && !changed) {
            return (shortest, violation);
        }
        if !changed || portion > shortest.steps.len() {
            portion = (portion / 2).max(1);
        }
    }
}

/// All steps but those of a range, whose time passes all the same.
fn without(steps: &[Timed], first: usize, end: usize) -> Vec<Timed> {
    let mut kept = steps[..first].to_vec();
    let passed: u64 = steps[first..end].iter().map(|(after, _)| after).sum();
    kept.extend(
        steps[end..]
            .iter()
            .enumerate()
            .map(|(index, (after, step))| {
                let extra = if index == 0 { passed } else { 0 };
                (after + extra, *step)
            }),
    );
    kept
}
