"""Methods by gradients alone: a penalty in the place of second derivatives."""
