// Opaque: see README.md.
#pragma once

#include "cusolverDn.h"
