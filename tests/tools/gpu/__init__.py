"""What only a GPU can show: ``make gpu``. Everything that needs none also runs on the CPU (``--device cpu``)."""
