!> A network from Fortran, second half: a gradient, a module's forward and backward, and training (export.py).
!>
!>     ./network network.pt2
program network
  use, intrinsic :: iso_fortran_env, only: int64, real64
  use aot_backward
  implicit none
  integer, parameter :: atoms = 12, batch = 64, steps = 200
  type(aotb_package) :: package
  type(aotb_function) :: energy, net, training
  type(aotb_progress) :: progress
  character(:), allocatable :: extra
  character(256) :: path
  integer :: i, status
  real(real64), target :: positions(3, atoms), forces(3, atoms), value
  real(real64), target :: points(2, batch), targets(1, batch), predictions(1, batch), incoming(1, batch), by_points(2, batch)
  real(real64), target :: weight(2, 16), loss, again

  path = "network.pt2"
  if (command_argument_count() > 0) call get_command_argument(1, path)
  positions = reshape([(sin(real(i, real64)), i = 1, size(positions))], shape(positions))
  points = reshape([(cos(real(i, real64)), i = 1, size(points))], shape(points))
  targets(1, :) = sin(3 * points(1, :)) * points(2, :)
  call package%open(path)

  ! 1. A value and its gradient. (3, atoms) in Fortran is (atoms, 3) in Python.
  call package%get("energy", energy)
  print "(a, 1x, a)", "metadata", package%metadata("energy")
  call energy%run([tensor(positions)], [tensor(value), tensor(forces)])
  forces = -forces
  print "(a, es25.16)", "energy  ", value
  print "(a, es25.16)", "force   ", forces(1, 1)

  ! 2. A module's forward, and its backward from a gradient that the program computes.
  call package%get("network", net)
  call net%forward([tensor(points)], [tensor(predictions)])
  incoming = 2 * (predictions - targets) / batch
  print "(a, es25.16)", "loss    ", sum((predictions - targets)**2) / batch
  call net%backward([tensor(incoming)], [aotb_tensor(), aotb_tensor(), aotb_tensor(), aotb_tensor(), tensor(by_points)])
  print "(a, es25.16)", "by point", by_points(1, 1)

  ! 3. Training. `run` computes the loss and the gradients, and makes an update.
  call package%get("step", training)
  do i = 1, steps
    if (i == 101) call training%number("lr", 0.002_real64)
    if (i == 151) call training%save("network.state", '{"step": 150}')
    call training%run([tensor(points), tensor(targets)], [tensor(loss)])
    if (i == 1 .or. mod(i, 50) == 0) print "(a, i4, es25.16)", "step", i, loss
  end do
  progress = training%progress()
  print "(a, i5)", "updates ", progress%updates

  ! 4. From the saved state, the same steps have the same losses.
  call training%resume("network.state", extra)
  do i = 151, steps
    call training%run([tensor(points), tensor(targets)], [tensor(again)])
  end do
  print "(2a, l2)", "resumed from ", extra, abs(again - loss) < tiny(loss)

  ! 5. The trained weights in the module; each function has its own.
  call aotb_copy(training%state("0.weight"), tensor(weight))
  call aotb_copy(tensor(weight), net%state("0.weight"))
  do i = 1, 3
    associate (name => [character(8) :: "0.bias", "2.weight", "2.bias"])
      call aotb_copy(training%state(name(i)), net%state(name(i)))
    end associate
  end do
  call net%run([tensor(points)], [tensor(predictions)])
  print "(a, l2)", "trained ", sum((predictions - targets)**2) / batch < loss

  ! 6. Without `status`, an error stops the program.
  call energy%run([tensor(points)], status=status)
  print "(a, i2, 1x, a)", "error   ", status, aotb_error()
  call energy%free()
  call net%free()
  call training%free()
  call package%close()
end program
