"""`splaxel-city`: photographs of a procedural city in MatrixCity's layout, from any number of cameras.

    command -> photograph -> materials -> textures
            -> layout, cameras -> streets -> buildings, furniture -> mesh

Light is traced by Open3D, never by the ops of this package: what is trained on these pictures is not judged by itself.
"""
