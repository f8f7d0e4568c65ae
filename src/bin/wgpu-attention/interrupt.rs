//! Ctrl-C: what is done is kept.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// The exit status of a program that was interrupted, as shells have it.
pub(crate) const STATUS: u8 = 130;

/// From now on the first Ctrl-C is only remembered; the second ends the program at once.
pub(crate) fn listen() {
    static LISTENING: Once = Once::new();
    LISTENING.call_once(|| {
        let set = ctrlc::set_handler(|| {
            if REQUESTED.swap(true, Ordering::SeqCst) {
                std::process::exit(STATUS.into());
            }
            crate::tell("interrupted: ending after what is being measured; once more ends at once");
        });
        if let Err(error) = set {
            log::warn!("Ctrl-C will end the program at once: {error}");
        }
    });
}

/// Whether somebody wants the program to end.
pub(crate) fn requested() -> bool {
    REQUESTED.load(Ordering::SeqCst)
}
