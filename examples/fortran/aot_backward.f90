!> Packages of aot-backward from Fortran 2018: gradients, modules and training steps, without Python and without PyTorch.
!>
!> The comments of aot_backward.h apply. Three things differ:
!>
!> - Arrays keep their memory, so the order of their dimensions is reversed: x(3, n) in Fortran is a tensor (n, 3) in Python.
!> - tensor(x) describes a variable, which needs the attribute target. Results are written into the variables that you pass.
!> - Procedures have an optional status. Without it, an error prints its message and stops the program.
module aot_backward
  use, intrinsic :: iso_c_binding
  use, intrinsic :: iso_fortran_env, only: error_unit
  implicit none
  private
  public :: aotb_package, aotb_function, aotb_tensor, aotb_progress, tensor, aotb_copy, aotb_error

  integer, parameter, public :: aotb_ok = 0, aotb_io = 1, aotb_format = 2, aotb_incompatible = 3, aotb_signature = 4, &
    aotb_name = 5, aotb_input = 6, aotb_state = 7, aotb_run = 8, aotb_memory = 9
  integer, parameter :: most_dimensions = 8

  !> A view of a variable or of a tensor of a function. The default, aotb_tensor(), is no tensor: a result or an incoming
  !> gradient that is left out.
  type :: aotb_tensor
    type(c_ptr) :: data = c_null_ptr
    integer :: code = 2, bits = 64, dimensions = 0
    integer(c_int64_t) :: sizes(most_dimensions) = 0 !< in Python's order
  end type

  type, bind(c) :: aotb_progress
    integer(c_int64_t) :: updates, skipped, accumulated
    real(c_double) :: grad_norm, loss_scale
  end type

  type :: aotb_package
    type(c_ptr), private :: handle = c_null_ptr
  contains
    procedure :: open => package_open
    procedure :: get => package_get
    procedure :: metadata => package_metadata
    procedure :: seed => package_seed
    procedure :: threads => package_threads
    procedure :: close => package_close
  end type

  type :: aotb_function
    type(c_ptr), private :: handle = c_null_ptr
  contains
    procedure :: run => function_run
    procedure :: forward => function_forward
    procedure :: backward => function_backward
    procedure :: accumulate => function_accumulate
    procedure :: update => function_update
    procedure :: train => function_train
    procedure :: state => function_state
    procedure :: number => function_number
    procedure :: progress => function_progress
    procedure :: save => function_save
    procedure :: resume => function_resume
    procedure :: free => function_free
  end type

  !> tensor(x): x is real(c_double), real(c_float), integer(c_int64_t), integer(c_int32_t) or logical(c_bool), a scalar or a
  !> contiguous array.
  interface tensor
    module procedure tensor_double, tensor_float, tensor_int64, tensor_int32, tensor_bool
  end interface

  type, bind(c) :: dl_tensor
    type(c_ptr) :: data
    integer(c_int32_t) :: device_type, device_id, ndim
    integer(c_int8_t) :: code, bits
    integer(c_int16_t) :: lanes
    type(c_ptr) :: shape, strides
    integer(c_int64_t) :: byte_offset
  end type

  type, bind(c) :: c_options
    type(c_ptr) :: backend = c_null_ptr, public_key = c_null_ptr
    integer(c_int) :: unchecked = 0
  end type

  abstract interface
    integer(c_int) function c_call(f, inputs, input_count, outputs, output_count) bind(c)
      import
      type(c_ptr), value :: f
      type(dl_tensor), intent(in) :: inputs(*)
      type(dl_tensor), intent(inout) :: outputs(*)
      integer(c_int32_t), value :: input_count, output_count
    end function
  end interface

  procedure(c_call), bind(c, name="aotb_run") :: c_run
  procedure(c_call), bind(c, name="aotb_forward") :: c_forward
  procedure(c_call), bind(c, name="aotb_backward") :: c_backward
  procedure(c_call), bind(c, name="aotb_accumulate") :: c_accumulate

  interface
    type(c_ptr) function c_error() bind(c, name="aotb_error")
      import
    end function
    integer(c_int) function c_open(path, options, package) bind(c, name="aotb_open")
      import
      character(kind=c_char), intent(in) :: path(*)
      type(c_options), intent(in) :: options
      type(c_ptr), intent(out) :: package
    end function
    subroutine c_close(package) bind(c, name="aotb_close")
      import
      type(c_ptr), value :: package
    end subroutine
    integer(c_int) function c_get(package, entry, f) bind(c, name="aotb_get")
      import
      type(c_ptr), value :: package
      character(kind=c_char), intent(in) :: entry(*)
      type(c_ptr), intent(out) :: f
    end function
    type(c_ptr) function c_metadata(package, entry) bind(c, name="aotb_metadata")
      import
      type(c_ptr), value :: package, entry
    end function
    integer(c_int) function c_seed(package, seed) bind(c, name="aotb_seed")
      import
      type(c_ptr), value :: package
      integer(c_int64_t), value :: seed
    end function
    integer(c_int) function c_threads(package, count) bind(c, name="aotb_threads")
      import
      type(c_ptr), value :: package
      integer(c_int), value :: count
    end function
    subroutine c_free(f) bind(c, name="aotb_free")
      import
      type(c_ptr), value :: f
    end subroutine
    integer(c_int) function c_train(f, training) bind(c, name="aotb_train")
      import
      type(c_ptr), value :: f
      integer(c_int), value :: training
    end function
    integer(c_int) function c_state(f, name, view) bind(c, name="aotb_state")
      import
      type(c_ptr), value :: f
      character(kind=c_char), intent(in) :: name(*)
      type(dl_tensor), intent(out) :: view
    end function
    integer(c_int) function c_update(f) bind(c, name="aotb_update")
      import
      type(c_ptr), value :: f
    end function
    integer(c_int) function c_number(f, group, key, position, value) bind(c, name="aotb_number")
      import
      type(c_ptr), value :: f
      integer(c_int64_t), value :: group, position
      character(kind=c_char), intent(in) :: key(*)
      real(c_double), value :: value
    end function
    integer(c_int) function c_progress(f, progress) bind(c, name="aotb_progress_of")
      import
      type(c_ptr), value :: f
      type(aotb_progress), intent(out) :: progress
    end function
    integer(c_int) function c_save(f, path, extra) bind(c, name="aotb_save")
      import
      type(c_ptr), value :: f, extra
      character(kind=c_char), intent(in) :: path(*)
    end function
    integer(c_int) function c_resume(f, path, extra) bind(c, name="aotb_resume")
      import
      type(c_ptr), value :: f
      character(kind=c_char), intent(in) :: path(*)
      type(c_ptr), intent(out) :: extra
    end function
    integer(c_size_t) function c_strlen(text) bind(c, name="strlen")
      import
      type(c_ptr), value :: text
    end function
    subroutine c_memcpy(to, from, bytes) bind(c, name="memcpy")
      import
      type(c_ptr), value :: to, from
      integer(c_size_t), value :: bytes
    end subroutine
  end interface

contains

  !> The message of the last failed call.
  function aotb_error() result(message)
    character(:), allocatable :: message
    message = from_c(c_error())
  end function

  ! --- packages ------------------------------------------------------------------------------------------------------------

  !> Opens a package. backend: "standalone", "libtorch" or the path of libtorch_cpu.so. unchecked: also runs entries that
  !> export did not compare with eager on this backend. public_key: the PEM file of the required signature.
  subroutine package_open(self, path, backend, unchecked, public_key, status)
    class(aotb_package), intent(inout) :: self
    character(*), intent(in) :: path
    character(*), intent(in), optional :: backend, public_key
    logical, intent(in), optional :: unchecked
    integer, intent(out), optional :: status
    character(:), allocatable, target :: backend_text, key_text
    type(c_options) :: options
    if (present(backend)) then
      backend_text = to_c(backend)
      options%backend = c_loc(backend_text)
    end if
    if (present(public_key)) then
      key_text = to_c(public_key)
      options%public_key = c_loc(key_text)
    end if
    if (present(unchecked)) options%unchecked = merge(1, 0, unchecked)
    call check(c_open(to_c(path), options, self%handle), status)
  end subroutine

  !> Makes a function from an entry.
  subroutine package_get(self, entry, f, status)
    class(aotb_package), intent(in) :: self
    character(*), intent(in) :: entry
    type(aotb_function), intent(inout) :: f
    integer, intent(out), optional :: status
    call check(c_get(self%handle, to_c(entry), f%handle), status)
  end subroutine

  !> The author's metadata of an entry, or of the package without `entry`: JSON. Empty if there is no such entry.
  function package_metadata(self, entry) result(json)
    class(aotb_package), intent(in) :: self
    character(*), intent(in), optional :: entry
    character(:), allocatable :: json
    character(:), allocatable, target :: name
    if (present(entry)) then
      name = to_c(entry)
      json = from_c(c_metadata(self%handle, c_loc(name)))
    else
      json = from_c(c_metadata(self%handle, c_null_ptr))
    end if
  end function

  subroutine package_seed(self, seed, status)
    class(aotb_package), intent(in) :: self
    integer(c_int64_t), intent(in) :: seed
    integer, intent(out), optional :: status
    call check(c_seed(self%handle, seed), status)
  end subroutine

  subroutine package_threads(self, count, status)
    class(aotb_package), intent(in) :: self
    integer, intent(in) :: count
    integer, intent(out), optional :: status
    call check(c_threads(self%handle, int(count, c_int)), status)
  end subroutine

  !> Closes the package. Its functions stay valid.
  subroutine package_close(self)
    class(aotb_package), intent(inout) :: self
    call c_close(self%handle)
    self%handle = c_null_ptr
  end subroutine

  ! --- calls ---------------------------------------------------------------------------------------------------------------

  !> Calls the function. outputs: the outputs, then the gradients of a grad entry; it may be shorter than the results.
  subroutine function_run(self, inputs, outputs, status)
    class(aotb_function), intent(in) :: self
    type(aotb_tensor), intent(in) :: inputs(:)
    type(aotb_tensor), intent(in), optional :: outputs(:)
    integer, intent(out), optional :: status
    call call_c(c_run, self, inputs, outputs, status)
  end subroutine

  !> Runs a module's forward, to be followed by backward.
  subroutine function_forward(self, inputs, outputs, status)
    class(aotb_function), intent(in) :: self
    type(aotb_tensor), intent(in) :: inputs(:)
    type(aotb_tensor), intent(in), optional :: outputs(:)
    integer, intent(out), optional :: status
    call call_c(c_forward, self, inputs, outputs, status)
  end subroutine

  !> Runs the backward of the last forward with the incoming gradients of its outputs.
  subroutine function_backward(self, incoming, gradients, status)
    class(aotb_function), intent(in) :: self
    type(aotb_tensor), intent(in) :: incoming(:)
    type(aotb_tensor), intent(in), optional :: gradients(:)
    integer, intent(out), optional :: status
    call call_c(c_backward, self, incoming, gradients, status)
  end subroutine

  !> Accumulates the gradients of a step; update uses their sum.
  subroutine function_accumulate(self, inputs, outputs, status)
    class(aotb_function), intent(in) :: self
    type(aotb_tensor), intent(in) :: inputs(:)
    type(aotb_tensor), intent(in), optional :: outputs(:)
    integer, intent(out), optional :: status
    call call_c(c_accumulate, self, inputs, outputs, status)
  end subroutine

  subroutine function_update(self, status)
    class(aotb_function), intent(in) :: self
    integer, intent(out), optional :: status
    call check(c_update(self%handle), status)
  end subroutine

  !> Selects training mode (dropout, batch statistics) or evaluation mode.
  subroutine function_train(self, training, status)
    class(aotb_function), intent(in) :: self
    logical, intent(in) :: training
    integer, intent(out), optional :: status
    call check(c_train(self%handle, merge(1_c_int, 0_c_int, training)), status)
  end subroutine

  subroutine function_free(self)
    class(aotb_function), intent(inout) :: self
    call c_free(self%handle)
    self%handle = c_null_ptr
  end subroutine

  ! --- training ------------------------------------------------------------------------------------------------------------

  !> A view of a parameter, buffer or optimizer state, to be read or written by aotb_copy.
  function function_state(self, name, status) result(view)
    class(aotb_function), intent(in) :: self
    character(*), intent(in) :: name
    integer, intent(out), optional :: status
    type(aotb_tensor) :: view
    type(dl_tensor) :: found
    integer(c_int64_t), pointer :: sizes(:)
    integer(c_int) :: failed
    failed = c_state(self%handle, to_c(name), found)
    call check(failed, status)
    if (failed /= aotb_ok) return
    call c_f_pointer(found%shape, sizes, [found%ndim])
    view = viewed(found%data, int(found%code), int(found%bits), sizes)
  end function

  !> Sets a hyperparameter such as "lr". group: the parameter group, 0 by default; -1 for clip_norm and clip_value.
  subroutine function_number(self, key, value, group, position, status)
    class(aotb_function), intent(in) :: self
    character(*), intent(in) :: key
    real(c_double), intent(in) :: value
    integer, intent(in), optional :: group, position
    integer, intent(out), optional :: status
    integer(c_int64_t) :: in_group, at
    in_group = 0
    at = -1
    if (present(group)) in_group = group
    if (present(position)) at = position
    call check(c_number(self%handle, in_group, to_c(key), at, value), status)
  end subroutine

  function function_progress(self, status) result(progress)
    class(aotb_function), intent(in) :: self
    integer, intent(out), optional :: status
    type(aotb_progress) :: progress
    call check(c_progress(self%handle, progress), status)
  end function

  !> Saves the training state. extra: your own JSON.
  subroutine function_save(self, path, extra, status)
    class(aotb_function), intent(in) :: self
    character(*), intent(in) :: path
    character(*), intent(in), optional :: extra
    integer, intent(out), optional :: status
    character(:), allocatable, target :: json
    if (present(extra)) then
      json = to_c(extra)
      call check(c_save(self%handle, to_c(path), c_loc(json)), status)
    else
      call check(c_save(self%handle, to_c(path), c_null_ptr), status)
    end if
  end subroutine

  subroutine function_resume(self, path, extra, status)
    class(aotb_function), intent(in) :: self
    character(*), intent(in) :: path
    character(:), allocatable, intent(out), optional :: extra
    integer, intent(out), optional :: status
    type(c_ptr) :: json
    integer(c_int) :: failed
    failed = c_resume(self%handle, to_c(path), json)
    call check(failed, status)
    if (present(extra) .and. failed == aotb_ok) extra = from_c(json)
  end subroutine

  ! --- tensors -------------------------------------------------------------------------------------------------------------

  !> Copies one view into another of the same type and sizes.
  subroutine aotb_copy(from, to)
    type(aotb_tensor), intent(in) :: from, to
    if (from%code /= to%code .or. from%bits /= to%bits .or. from%dimensions /= to%dimensions .or. any(from%sizes /= to%sizes)) &
      call stop_with("aotb_copy: expected the same type and sizes, got others. Declare the variable with those of the tensor.")
    call c_memcpy(to%data, from%data, int(product(from%sizes(:from%dimensions)) * from%bits / 8, c_size_t))
  end subroutine

  function tensor_double(x) result(view)
    real(c_double), target, contiguous :: x(..)
    type(aotb_tensor) :: view
    view = viewed(c_loc(x), 2, 64, reversed(shape(x, c_int64_t)))
  end function

  function tensor_float(x) result(view)
    real(c_float), target, contiguous :: x(..)
    type(aotb_tensor) :: view
    view = viewed(c_loc(x), 2, 32, reversed(shape(x, c_int64_t)))
  end function

  function tensor_int64(x) result(view)
    integer(c_int64_t), target, contiguous :: x(..)
    type(aotb_tensor) :: view
    view = viewed(c_loc(x), 0, 64, reversed(shape(x, c_int64_t)))
  end function

  function tensor_int32(x) result(view)
    integer(c_int32_t), target, contiguous :: x(..)
    type(aotb_tensor) :: view
    view = viewed(c_loc(x), 0, 32, reversed(shape(x, c_int64_t)))
  end function

  function tensor_bool(x) result(view)
    logical(c_bool), target, contiguous :: x(..)
    type(aotb_tensor) :: view
    view = viewed(c_loc(x), 6, 8, reversed(shape(x, c_int64_t)))
  end function

  function viewed(data, code, bits, sizes) result(view)
    type(c_ptr), intent(in) :: data
    integer, intent(in) :: code, bits
    integer(c_int64_t), intent(in) :: sizes(:)
    type(aotb_tensor) :: view
    if (size(sizes) > most_dimensions) call stop_with("tensor: expected at most 8 dimensions, got more. Reshape the array.")
    view%data = data
    view%code = code
    view%bits = bits
    view%dimensions = size(sizes)
    view%sizes(:size(sizes)) = sizes
  end function

  pure function reversed(sizes)
    integer(c_int64_t), intent(in) :: sizes(:)
    integer(c_int64_t) :: reversed(size(sizes))
    reversed = sizes(size(sizes):1:-1)
  end function

  subroutine call_c(procedure, f, inputs, outputs, status)
    procedure(c_call) :: procedure
    type(aotb_function), intent(in) :: f
    type(aotb_tensor), intent(in), target :: inputs(:)
    type(aotb_tensor), intent(in), target, optional :: outputs(:)
    integer, intent(out), optional :: status
    type(dl_tensor) :: given(size(inputs))
    type(dl_tensor), allocatable :: results(:)
    integer :: i
    allocate(results(0))
    do i = 1, size(inputs)
      given(i) = described(inputs(i))
    end do
    if (present(outputs)) results = [(described(outputs(i)), i = 1, size(outputs))]
    call check(procedure(f%handle, given, size(given), results, size(results)), status)
  end subroutine

  function described(view) result(out)
    type(aotb_tensor), intent(in), target :: view
    type(dl_tensor) :: out
    out = dl_tensor(view%data, 1, 0, view%dimensions, int(view%code, c_int8_t), int(view%bits, c_int8_t), 1_c_int16_t, &
      c_loc(view%sizes), c_null_ptr, 0)
  end function

  ! --- text and errors -----------------------------------------------------------------------------------------------------

  function to_c(text)
    character(*), intent(in) :: text
    character(len_trim(text) + 1, kind=c_char) :: to_c
    to_c = trim(text) // c_null_char
  end function

  function from_c(text) result(out)
    type(c_ptr), intent(in) :: text
    character(:), allocatable :: out
    character(kind=c_char), pointer :: characters(:)
    integer :: i
    out = ""
    if (.not. c_associated(text)) return
    call c_f_pointer(text, characters, [c_strlen(text)])
    out = repeat(" ", size(characters))
    do i = 1, size(characters)
      out(i:i) = characters(i)
    end do
  end function

  subroutine check(failed, status)
    integer(c_int), intent(in) :: failed
    integer, intent(out), optional :: status
    if (present(status)) then
      status = failed
    else if (failed /= aotb_ok) then
      call stop_with(aotb_error())
    end if
  end subroutine

  subroutine stop_with(message)
    character(*), intent(in) :: message
    write (error_unit, "(a)") message
    error stop 1
  end subroutine

end module
