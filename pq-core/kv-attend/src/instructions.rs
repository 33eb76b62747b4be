//! How the file of an instruction set lists its instructions.

/// Evaluates an expression of intrinsics, in a method of an instruction set.
#[doc(hidden)]
#[macro_export]
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: a value of an instruction set exists only where the CPU has all its features; the caller
        // vouches for pointers.
        unsafe { $e }
    }};
}

/// Methods of an instruction set, on `self`, that are one expression of intrinsics each.
#[doc(hidden)]
#[macro_export]
macro_rules! instructions {
    () => {};
    (fn $name:ident($($x:ident: $of:ty),*) $(-> $result:ty)? = $e:expr; $($rest:tt)*) => {
        #[inline(always)]
        fn $name(self, $($x: $of),*) $(-> $result)? {
            $crate::op!($e)
        }
        $crate::instructions! { $($rest)* }
    };
    (unsafe fn $name:ident($($x:ident: $of:ty),*) $(-> $result:ty)? = $e:expr; $($rest:tt)*) => {
        #[inline(always)]
        unsafe fn $name(self, $($x: $of),*) $(-> $result)? {
            $crate::op!($e)
        }
        $crate::instructions! { $($rest)* }
    };
}
