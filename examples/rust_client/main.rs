//! Gradients from Rust, over aot_backward.h: downhill on the energy of examples/forces, in parallel threads.
//!
//!     python examples/forces/export.py forces.pt2
//!     rustc -O examples/rust_client/main.rs -o relax -L build/native -C link-args=-Wl,-rpath,build/native
//!     ./relax forces.pt2
//!
//! What the header declares is written out here by hand; `bindgen` makes the same of it.

use std::ffi::{c_char, c_void, CStr, CString};
use std::ptr::{null, null_mut};

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDevice {
    device_type: i32,
    device_id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype: DlDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[link(name = "aot_backward")]
extern "C" {
    fn aotb_open(path: *const c_char, options: *const c_void, out: *mut *mut c_void) -> i32;
    fn aotb_close(package: *mut c_void);
    fn aotb_get(package: *mut c_void, entry: *const c_char, out: *mut *mut c_void) -> i32;
    fn aotb_free(function: *mut c_void);
    fn aotb_run(function: *mut c_void, inputs: *const DlTensor, inputs_count: u32, outputs: *mut DlTensor, outputs_count: u32) -> i32;
    fn aotb_error() -> *const c_char;
}

fn check(status: i32) -> Result<(), String> {
    match status {
        0 => Ok(()),
        _ => Err(unsafe { CStr::from_ptr(aotb_error()) }.to_string_lossy().into_owned()),
    }
}

/// An open package, which threads may share.
struct Package(*mut c_void);
unsafe impl Sync for Package {}

impl Package {
    fn open(path: &str) -> Result<Self, String> {
        let (path, mut package) = (CString::new(path).map_err(|e| e.to_string())?, null_mut());
        check(unsafe { aotb_open(path.as_ptr(), null(), &mut package) })?;
        Ok(Package(package))
    }

    /// A gradient function with weights of its own, for one thread.
    fn grad(&self, entry: &str) -> Result<Grad, String> {
        let (entry, mut function) = (CString::new(entry).map_err(|e| e.to_string())?, null_mut());
        check(unsafe { aotb_get(self.0, entry.as_ptr(), &mut function) })?;
        Ok(Grad(function))
    }
}

impl Drop for Package {
    fn drop(&mut self) {
        unsafe { aotb_close(self.0) }
    }
}

struct Grad(*mut c_void);

impl Grad {
    /// The value at `x`, rows of three float64 numbers; the gradient goes to `gradient`.
    fn call(&mut self, x: &mut [f64], gradient: &mut [f64]) -> Result<f64, String> {
        let (mut value, mut shape) = (0.0, [x.len() as i64 / 3, 3]);
        let float64 = DlDataType { code: 2, bits: 64, lanes: 1 };
        let tensor = |data: *mut f64, ndim: i32, shape: *mut i64| DlTensor {
            data: data.cast(),
            device: DlDevice { device_type: 1, device_id: 0 },
            ndim,
            dtype: float64,
            shape,
            strides: null_mut(),
            byte_offset: 0,
        };
        let input = tensor(x.as_mut_ptr(), 2, shape.as_mut_ptr());
        let mut results = [tensor(&mut value, 0, null_mut()), tensor(gradient.as_mut_ptr(), 2, shape.as_mut_ptr())];
        check(unsafe { aotb_run(self.0, &input, 1, results.as_mut_ptr(), 2) })?;
        Ok(value)
    }
}

impl Drop for Grad {
    fn drop(&mut self) {
        unsafe { aotb_free(self.0) }
    }
}

/// Down the gradient from a lattice of `side`³ atoms; the energy before and after.
fn relax(package: &Package, side: usize) -> Result<(f64, f64), String> {
    let mut energy = package.grad("energy")?;
    let mut x: Vec<f64> = (0..side.pow(3)).flat_map(|i| [i / side / side, i / side % side, i % side].map(|c| 1.2 * c as f64)).collect();
    let mut gradient = vec![0.0; x.len()];
    let first = energy.call(&mut x, &mut gradient)?;
    let mut last = first;
    for _ in 0..200 {
        x.iter_mut().zip(&gradient).for_each(|(x, g)| *x -= 0.01 * g);
        last = energy.call(&mut x, &mut gradient)?;
    }
    Ok((first, last))
}

fn main() -> Result<(), String> {
    let path = std::env::args().nth(1).unwrap_or("forces.pt2".into());
    let package = Package::open(&path)?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (2..6).map(|side| (side, scope.spawn({ let package = &package; move || relax(package, side) }))).collect();
        for (side, thread) in threads {
            let (first, last) = thread.join().map_err(|_| "a thread panicked")??;
            println!("{:3} atoms: energy {first:.6} -> {last:.6}", side.pow(3));
            assert!(last < first);
        }
        Ok::<(), String>(())
    })?;
    let error = package.grad("nothing").err().unwrap_or_default();
    println!("{error}");
    Ok(())
}
