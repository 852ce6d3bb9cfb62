"""Pure torch: names, layouts, tracks, chunks, codecs, outer optimizers, schedules. It knows no other part."""
