"""Pure torch: names, layouts, tracks, chunks, codecs, outer optimizers, schedules. Knows no other part of the package."""
