"""What all other packages use: errors, memory, buffers, traces, and the folder of what runs remember."""
