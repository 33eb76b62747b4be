//! Calls of the tokenizers library that may panic.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    /// Whether this thread is inside a guarded call, whose panics are silent.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Calls the library, which panics on some files, and on some texts with files that it has accepted. A panic
/// becomes an error and is silent; other panics print as before.
pub(super) fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                previous(info);
            }
        }));
    });
    let outer = GUARDED.replace(true);
    // Unwind safe: a panic discards the value being built, and a tokenizer's only mutable state is a cache
    // behind a lock, which the library stops using when poisoned.
    let outcome = panic::catch_unwind(AssertUnwindSafe(call));
    GUARDED.set(outer);
    match outcome {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(payload) => Err(format!("the tokenizers library panicked: {}", message(payload.as_ref()))),
    }
}

fn message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_and_silent_on_its_own_thread_only() {
        thread_local! {
            static PRINTED: Cell<usize> = const { Cell::new(0) };
        }
        panic::set_hook(Box::new(|_| PRINTED.set(PRINTED.get() + 1)));
        assert_eq!(guarded(|| Ok(3)), Ok(3));
        assert_eq!(guarded::<()>(|| Err("no".into())), Err("no".into()));
        let panicked = |what: &str| guarded::<()>(|| panic!("{what}")).unwrap_err();
        assert!(panicked("at once").ends_with("at once"));
        assert_eq!(PRINTED.get(), 0);
        assert!(panic::catch_unwind(|| panic!("outside")).is_err());
        assert_eq!(PRINTED.get(), 1);
        let others: Vec<_> = (0..4)
            .map(|i| {
                std::thread::spawn(move || {
                    for _ in 0..100 {
                        let silent = i % 2 == 0;
                        if silent {
                            assert!(guarded::<()>(|| panic!("guarded")).is_err());
                        } else {
                            assert!(panic::catch_unwind(|| panic!("not guarded")).is_err());
                        }
                    }
                    PRINTED.get()
                })
            })
            .collect();
        let printed: Vec<_> = others.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!(printed, [0, 100, 0, 100]);
    }
}
