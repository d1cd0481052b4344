// For the host compiler only: see ../README.md. The real one checks that NVIDIA's compiler supports the host's,
// and includes what follows.
#pragma once

#include <features.h>
