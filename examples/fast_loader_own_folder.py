"""The fast loader on a folder of one's own: PHOTOS/CLASS/IMAGE, in any format that Pillow reads.

python fast_loader_own_folder.py PHOTOS
"""

import sys

from dataloading.dataset import ImageBatches, ImageFolder
from dataloading.loader import FastLoader

files = ImageFolder(sys.argv[1], image_size=64)
loader = FastLoader(ImageBatches(files), batch_size=32, shuffle=True, num_workers=2)
print(f"{len(files)} images of {', '.join(files.classes)}")
for epoch in range(2):
    loader.set_epoch(epoch)  # another order
    images_seen, brightness = 0, 0.0
    for images, labels in loader:  # uint8 [n, 3, 64, 64] and int64 [n]
        inputs = images.float() / 255  # on a GPU, if the loader has device="cuda"
        images_seen += len(labels)
        brightness += inputs.mean((1, 2, 3)).sum().item()
    print(f"epoch {epoch}: {images_seen} images, mean brightness {brightness / images_seen:.3f}")
