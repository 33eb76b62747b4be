//! Arrays of Python in place: their elements, shape and strides, from the buffer protocol or from DLPack.

use std::ffi::c_void;
use std::slice;

use half::{bf16, f16};
use kv_attend::{Element, ElementType};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyCapsule, PyMemoryView};

use crate::error::{Error, Result};

/// The element type of a name, which may be torch's.
pub fn parse_dtype(name: &str) -> Result<ElementType> {
    let short = match name {
        "float32" => "f32",
        "float16" => "f16",
        "bfloat16" => "bf16",
        name => name,
    };
    short.parse().map_err(|e| Error::element(format!("`{name}`: {e}")))
}

/// Evaluates an expression with `$type` as the element type that is known at run time.
macro_rules! for_dtype {
    ($dtype:expr, $type:ident => $result:expr) => {
        match $dtype {
            kv_attend::ElementType::F32 => {
                type $type = f32;
                $result
            }
            kv_attend::ElementType::F16 => {
                type $type = half::f16;
                $result
            }
            kv_attend::ElementType::Bf16 => {
                type $type = half::bf16;
                $result
            }
        }
    };
}
pub(crate) use for_dtype;

/// An element with its [`ElementType`].
pub trait Typed: Element + codec_core::Element {
    const DTYPE: ElementType;
}
impl Typed for f32 {
    const DTYPE: ElementType = ElementType::F32;
}
impl Typed for f16 {
    const DTYPE: ElementType = ElementType::F16;
}
impl Typed for bf16 {
    const DTYPE: ElementType = ElementType::Bf16;
}

/// An array of Python, which stays alive and in place as long as this exists.
pub struct Array {
    address: usize,
    dtype: ElementType,
    shape: Vec<usize>,
    strides: Vec<usize>, // in elements
    writable: bool,
    _owner: Owner,
}

#[expect(dead_code, reason = "they are held, not used")]
enum Owner {
    Buffer(PyUntypedBuffer),
    Object(Py<PyAny>),
}

impl Array {
    pub fn get(object: &Bound<'_, PyAny>) -> Result<Self> {
        if let Ok(view) = object.cast::<View>() {
            return view.get().array(object);
        }
        // SAFETY: the object is alive.
        if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1 {
            return Self::of_buffer(object);
        }
        if object.hasattr("__dlpack__")? {
            return Self::of_dlpack(object);
        }
        let class = object.get_type().name()?;
        Err(Error::element(format!("{class} has neither the buffer protocol nor DLPack")))
    }

    fn of_buffer(object: &Bound<'_, PyAny>) -> Result<Self> {
        let buffer = buffer(object)?;
        let format = buffer.format().to_string_lossy().into_owned();
        let dtype = match format.trim_start_matches(['@', '=', '<']) {
            "f" => ElementType::F32,
            "e" => ElementType::F16,
            _ => {
                return Err(Error::element(format!(
                    "elements of the format `{format}`: expected f32 or f16; `View` gives others a type"
                )));
            }
        };
        if buffer.suboffsets().is_some_and(|offsets| offsets.iter().any(|&offset| offset >= 0)) {
            return Err(Error::element("rows of pointers to other rows: expected one block of memory"));
        }
        let size = dtype.size() as isize;
        let strides = buffer.strides().iter().map(|&bytes| (bytes % size == 0).then_some(bytes / size));
        let strides: Option<Vec<isize>> = strides.collect();
        let strides = strides.ok_or_else(|| Error::element("a stride is not a whole number of elements"))?;
        Self::new(
            buffer.buf_ptr() as usize,
            dtype,
            buffer.shape().to_vec(),
            &strides,
            !buffer.readonly(),
            Owner::Buffer(buffer),
        )
    }

    /// A page of an engine's cache: an array of this type and shape, or as many elements in one dimension, or
    /// their bytes.
    pub fn of_page(
        what: &str,
        object: &Bound<'_, PyAny>,
        dtype: ElementType,
        shape: &[usize],
    ) -> Result<Self> {
        let expected = shape.iter().product::<usize>();
        // SAFETY: the object is alive.
        if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1 {
            let buffer = buffer(object)?;
            if buffer.item_size() == 1 {
                let (len, expected) = (buffer.len_bytes(), expected * dtype.size());
                if len != expected {
                    return Err(Error::argument(format!("{what} has {len} B, expected {expected} B")));
                }
                if !buffer.is_c_contiguous() {
                    return Err(Error::element(format!("{what} is not contiguous")));
                }
                let strides: Vec<isize> = contiguous(shape).into_iter().map(|x| x as isize).collect();
                let (address, writable) = (buffer.buf_ptr() as usize, !buffer.readonly());
                return Self::new(address, dtype, shape.to_vec(), &strides, writable, Owner::Buffer(buffer));
            }
        }
        let mut array = Self::get(object)?;
        if array.dtype != dtype {
            let found = array.dtype;
            return Err(Error::element(format!("{what} has elements of {found}, expected {dtype}")));
        }
        if array.shape == [expected] && array.is_contiguous() {
            array.shape = shape.to_vec();
            array.strides = contiguous(shape);
        }
        array.expect(what, shape)?;
        Ok(array)
    }

    fn of_dlpack(object: &Bound<'_, PyAny>) -> Result<Self> {
        let capsule = object.call_method0("__dlpack__").map_err(|e| Error::element(e.to_string()))?;
        let capsule = capsule.cast::<PyCapsule>().map_err(PyErr::from)?;
        let pointer = capsule.pointer_checked(Some(c"dltensor"))?;
        // SAFETY: a capsule of this name holds a `DLManagedTensor`, which begins with a `DLTensor`. It lives
        // as long as the capsule, which calls its deleter unless a consumer has renamed it.
        let tensor = unsafe { pointer.cast::<DlTensor>().as_ref() };
        if !matches!(tensor.device_type, DL_CPU | DL_CUDA_HOST) {
            return Err(Error::element(
                "the array is in the memory of a device: expected memory of the host",
            ));
        }
        let dtype = match (tensor.code, tensor.bits, tensor.lanes) {
            (DL_FLOAT, 32, 1) => ElementType::F32,
            (DL_FLOAT, 16, 1) => ElementType::F16,
            (DL_BFLOAT, 16, 1) => ElementType::Bf16,
            (code, bits, _) => {
                return Err(Error::element(format!(
                    "elements of {bits} bits (DLPack's type {code}): expected f32, f16 or bf16"
                )));
            }
        };
        let dims =
            usize::try_from(tensor.ndim).map_err(|_| Error::element("a negative number of dimensions"))?;
        let numbers = |from: *const i64| match dims {
            0 => vec![],
            // SAFETY: shape and strides have `ndim` elements.
            _ => unsafe { slice::from_raw_parts(from, dims) }.to_vec(),
        };
        let shape = numbers(tensor.shape)
            .into_iter()
            .map(usize::try_from)
            .collect::<std::result::Result<Vec<_>, _>>();
        let shape = shape.map_err(|_| Error::element("a negative length"))?;
        let strides = match tensor.strides.is_null() {
            true => contiguous(&shape).into_iter().map(|x| x as isize).collect(),
            false => numbers(tensor.strides).into_iter().map(|x| x as isize).collect::<Vec<_>>(),
        };
        let address = (tensor.data as usize).saturating_add(tensor.byte_offset as usize);
        Self::new(address, dtype, shape, &strides, true, Owner::Object(capsule.clone().into_any().unbind()))
    }

    fn new(
        address: usize,
        dtype: ElementType,
        shape: Vec<usize>,
        strides: &[isize],
        writable: bool,
        owner: Owner,
    ) -> Result<Self> {
        if shape.contains(&0) {
            // No element is read, so that the address does not matter.
            let strides = contiguous(&shape);
            return Ok(Self { address: 64, dtype, shape, strides, writable, _owner: owner });
        }
        if address == 0 || !address.is_multiple_of(dtype.size()) {
            return Err(Error::element(format!("the memory is not aligned to elements of {dtype}")));
        }
        // The stride of a dimension of one element is never used.
        let strides =
            shape.iter().zip(strides).map(|(&n, &stride)| if n == 1 { Ok(0) } else { stride.try_into() });
        let strides: std::result::Result<Vec<usize>, _> = strides.collect();
        let strides = strides.map_err(|_| Error::element("a negative stride: make a copy"))?;
        Ok(Self { address, dtype, shape, strides, writable, _owner: owner })
    }

    pub const fn dtype(&self) -> ElementType {
        self.dtype
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// In elements; 0 where there is one element.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// The lengths of its `N` dimensions.
    pub fn dims<const N: usize>(&self, what: &str, expected: &str) -> Result<[usize; N]> {
        self.shape.as_slice().try_into().map_err(|_| {
            Error::argument(format!("{what} has {} dimensions, expected {expected}", self.shape.len()))
        })
    }

    /// Checks the shape.
    pub fn expect(&self, what: &str, shape: &[usize]) -> Result<()> {
        match self.shape == shape {
            true => Ok(()),
            false => Err(Error::argument(format!("{what} has shape {:?}, expected {shape:?}", self.shape))),
        }
    }

    /// Elements from the first to the last, with those between them that are not the array's.
    fn span(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        let last: usize = self.shape.iter().zip(&self.strides).map(|(&n, &stride)| (n - 1) * stride).sum();
        last + 1
    }

    /// The elements from the first to the last. The type is the array's.
    pub fn elements<E: Typed>(&self) -> &[E] {
        assert_eq!(E::DTYPE, self.dtype);
        // SAFETY: the owner exports this memory, as elements of this type, which have no invalid bits; the
        // address is aligned. No argument may be written while a call runs: the documentation says so, as
        // NumPy's does.
        unsafe { slice::from_raw_parts(self.address as *const E, self.span()) }
    }

    /// Rows (..., dim) as contiguous elements: in place if they are, else copied.
    pub fn contiguous<E: Typed>(&self) -> std::borrow::Cow<'_, [E]> {
        if self.is_contiguous() { self.elements().into() } else { self.gather().into() }
    }

    /// The elements in `f32`.
    pub fn floats(&self) -> std::borrow::Cow<'_, [f32]> {
        if self.dtype == ElementType::F32 {
            return self.contiguous();
        }
        for_dtype!(self.dtype, E => {
            let floats = self.gather::<E>().into_iter().map(<E as Element>::to_f32);
            floats.collect::<Vec<_>>().into()
        })
    }

    pub fn is_contiguous(&self) -> bool {
        let strides = contiguous(&self.shape);
        self.shape.iter().zip(&self.strides).zip(strides).all(|((&n, &a), b)| n <= 1 || a == b)
    }

    /// The elements in order.
    fn gather<E: Typed>(&self) -> Vec<E> {
        let elements = self.elements::<E>();
        self.offsets().map(|at| elements[at]).collect()
    }

    /// The offsets of the elements in order.
    fn offsets(&self) -> impl Iterator<Item = usize> {
        let n = self.shape.iter().product::<usize>();
        let mut index = vec![0; self.shape.len()];
        let mut at = 0;
        (0..n).map(move |_| {
            let this = at;
            for d in (0..self.shape.len()).rev() {
                index[d] += 1;
                at += self.strides[d];
                if index[d] < self.shape[d] {
                    break;
                }
                at -= index[d] * self.strides[d];
                index[d] = 0;
            }
            this
        })
    }

    /// Whether both have memory in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        let range = |array: &Self| (array.address, array.address + array.span() * array.dtype.size());
        let ((a, a_end), (b, b_end)) = (range(self), range(other));
        a < b_end && b < a_end
    }
}

/// The memory of an object that exports it; a number without dimensions has none.
fn buffer(object: &Bound<'_, PyAny>) -> Result<PyUntypedBuffer> {
    PyUntypedBuffer::get(object).map_err(|e| Error::element(e.to_string()))
}

/// An array to write to.
pub struct Output(Array);

impl Output {
    /// A new array of `f32` zeros, as a memory view.
    pub fn zeros<'py>(py: Python<'py>, shape: &[usize]) -> Result<(Bound<'py, PyAny>, Self)> {
        let len = shape.iter().try_fold(4_usize, |len, &n| len.checked_mul(n));
        let len = len.ok_or_else(|| Error::argument(format!("an array of shape {shape:?} is too large")))?;
        let bytes = PyByteArray::new_with(py, len, |_| Ok(()))?;
        let view = PyMemoryView::from(bytes.as_any())?.into_any();
        // A memory view casts only bytes that there are.
        let view = match len {
            0 => view.call_method1("cast", ("f",))?,
            _ => view.call_method1("cast", ("f", shape))?,
        };
        let mut array = Array::get(&view)?;
        array.shape = shape.to_vec();
        array.strides = contiguous(shape);
        Ok((view, Self(array)))
    }

    /// A new array of these elements.
    pub fn of<'py>(
        py: Python<'py>,
        elements: impl Iterator<Item = f32>,
        shape: &[usize],
    ) -> Result<Bound<'py, PyAny>> {
        let (view, mut out) = Self::zeros(py, shape)?;
        out.elements_mut().iter_mut().zip(elements).for_each(|(out, x)| *out = x);
        Ok(view)
    }

    /// The caller's array, which must have this shape and no memory in common with `inputs`; without one, a
    /// new one.
    pub fn get<'py>(
        py: Python<'py>,
        out: Option<&Bound<'py, PyAny>>,
        shape: &[usize],
        inputs: &[&Array],
    ) -> Result<(Bound<'py, PyAny>, Self)> {
        let Some(out) = out else { return Self::zeros(py, shape) };
        let array = Array::get(out)?;
        array.expect("out", shape)?;
        Self::check(&array, inputs)?;
        Ok((out.clone(), Self(array)))
    }

    /// The caller's array, of any shape.
    pub fn any(out: &Bound<'_, PyAny>, inputs: &[&Array]) -> Result<Self> {
        let array = Array::get(out)?;
        Self::check(&array, inputs)?;
        Ok(Self(array))
    }

    /// An array of the caller that no argument shares memory with.
    pub fn of_array(array: Array) -> Result<Self> {
        Self::check(&array, &[])?;
        Ok(Self(array))
    }

    fn check(array: &Array, inputs: &[&Array]) -> Result<()> {
        if !array.writable {
            return Err(Error::element("out is read-only"));
        }
        if array.shape.iter().zip(&array.strides).any(|(&n, &stride)| n > 1 && stride == 0) {
            return Err(Error::argument("elements of out share memory"));
        }
        if inputs.iter().any(|input| input.overlaps(array)) {
            return Err(Error::argument("out shares memory with an argument"));
        }
        Ok(())
    }

    pub const fn array(&self) -> &Array {
        &self.0
    }

    /// The elements from the first to the last. The type is the array's.
    pub fn elements_mut<E: Typed>(&mut self) -> &mut [E] {
        assert_eq!(E::DTYPE, self.0.dtype);
        // SAFETY: as for `Array::elements`; the memory is writable, and no argument shares it.
        unsafe { slice::from_raw_parts_mut(self.0.address as *mut E, self.0.span()) }
    }

    /// Lets `compute` write the elements in order, in `f32`: in place if they are contiguous, else through a
    /// copy.
    pub fn write<T>(&mut self, compute: impl FnOnce(&mut [f32]) -> Result<T>) -> Result<T> {
        if self.0.dtype == ElementType::F32 && self.0.is_contiguous() {
            return compute(self.elements_mut());
        }
        let mut floats = vec![0.0; self.0.shape.iter().product()];
        let result = compute(&mut floats)?;
        let offsets: Vec<usize> = self.0.offsets().collect();
        for_dtype!(self.0.dtype, E => {
            let elements = self.elements_mut::<E>();
            offsets.into_iter().zip(floats).for_each(|(at, x)| elements[at] = <E as Element>::from_f32(x));
        });
        Ok(result)
    }
}

/// Strides of rows without gaps.
fn contiguous(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1_usize; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d].saturating_mul(shape[d]);
    }
    strides
}

/// `DLTensor` of DLPack 0 and 1.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64, // null for contiguous elements
    byte_offset: u64,
}

const DL_CPU: i32 = 1;
const DL_CUDA_HOST: i32 = 3;
const DL_FLOAT: u8 = 2;
const DL_BFLOAT: u8 = 4;

/// Elements in memory that Python does not know the type of: bf16, which NumPy lacks, and the bytes of an
/// engine's pool.
#[pyclass(frozen, module = "kvcodes")]
pub struct View {
    buffer: PyUntypedBuffer,
    address: usize,
    dtype: ElementType,
    #[pyo3(get)]
    shape: Vec<usize>,
    strides: Vec<usize>,
}

#[pymethods]
impl View {
    #[new]
    #[pyo3(signature = (buffer, dtype, shape, strides=None, offset=0))]
    fn new(
        buffer: &Bound<'_, PyAny>,
        dtype: &str,
        shape: Vec<usize>,
        strides: Option<Vec<usize>>,
        offset: usize,
    ) -> Result<Self> {
        let (buffer, dtype) = (self::buffer(buffer)?, parse_dtype(dtype)?);
        if !buffer.is_c_contiguous() {
            return Err(Error::element("the buffer is not contiguous"));
        }
        let strides = strides.unwrap_or_else(|| contiguous(&shape));
        if strides.len() != shape.len() {
            return Err(Error::argument(format!("{} strides of {} dimensions", strides.len(), shape.len())));
        }
        let last = shape.iter().zip(&strides).try_fold(0_usize, |last, (&n, &stride)| {
            n.saturating_sub(1).checked_mul(stride).and_then(|x| x.checked_add(last))
        });
        let needed = match shape.contains(&0) {
            true => Some(0),
            false => last.and_then(|last| last.checked_add(1)?.checked_mul(dtype.size())),
        };
        let available = buffer.len_bytes().saturating_sub(offset);
        if needed.is_none_or(|needed| needed > available) {
            return Err(Error::argument(format!(
                "elements of shape {shape:?} and strides {strides:?} do not fit in {available} B"
            )));
        }
        let address = buffer.buf_ptr() as usize + offset.min(buffer.len_bytes());
        Ok(Self { buffer, address, dtype, shape, strides })
    }

    #[getter]
    fn dtype(&self) -> String {
        self.dtype.to_string()
    }
}

impl View {
    fn array(&self, object: &Bound<'_, PyAny>) -> Result<Array> {
        let owner = Owner::Object(object.clone().unbind());
        let strides: Vec<isize> = self.strides.iter().map(|&x| x as isize).collect();
        let writable = !self.buffer.readonly();
        Array::new(self.address, self.dtype, self.shape.clone(), &strides, writable, owner)
    }
}
