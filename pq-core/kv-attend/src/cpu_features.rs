//! The CPU features of each backend, to detect them and to compile for them.

/// The only list of a backend's CPU features. `detect` is an expression: whether the machine has all of them.
/// `run` defines the function `run`, which compiles a crate's `Kernel` for all of them, with the token that
/// proves it, and `with_features`, which compiles a part of a kernel.
///
/// The list includes implied features, since the compiler assumes all of them.
#[doc(hidden)]
#[macro_export]
macro_rules! cpu_features {
    (Avx2 => $what:ident) => {
        $crate::cpu_features! {
            @$what Avx2: "sse3" "ssse3" "sse4.1" "sse4.2" "avx" "avx2" "fma" "f16c"
        }
    };
    (Avx512 => $what:ident) => {
        $crate::cpu_features! {
            @$what Avx512: "sse3" "ssse3" "sse4.1" "sse4.2" "avx" "avx2" "fma" "f16c" "bmi1" "bmi2" "popcnt"
            "lzcnt" "avx512f" "avx512bw" "avx512dq" "avx512vl" "avx512vbmi" "avx512vnni"
        }
    };
    (@detect $token:ident: $($feature:tt)*) => {{
        #[cfg(feature = "std")]
        {
            // Every dispatch checks: one load instead of one per feature.
            static AVAILABLE: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
            *AVAILABLE.get_or_init(|| true $(&& std::is_x86_feature_detected!($feature))*)
        }
        #[cfg(not(feature = "std"))]
        {
            cfg!(all($(target_feature = $feature),*))
        }
    }};
    (@run $token:ident: $($feature:tt)*) => {
        /// Compiles `f`, which must be `#[inline(always)]`, as a function with the features.
        #[inline(never)]
        #[target_feature($(enable = $feature),*)]
        fn with_features<R>(f: impl FnOnce() -> R) -> R {
            f()
        }

        /// Compiles and runs a kernel. The caller has checked that the backend is available.
        pub(crate) fn run<K: Kernel>(kernel: K) -> K::Output {
            // SAFETY: `Run::run` calls this only where `Backend::is_available` has confirmed all these
            // features.
            unsafe {
                with_features(
                    #[inline(always)]
                    || kernel.vector($token(())),
                )
            }
        }
    };
}
