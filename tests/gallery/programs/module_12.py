def task_12_0(value, limit=0):
    return value * 12 + limit

def task_12_1(value, limit=1):
    return value * 13 + limit

def task_12_2(value, limit=2):
    return value * 14 + limit

def task_12_3(value, limit=3):
    return value * 15 + limit

def task_12_4(value, limit=4):
    return value * 16 + limit

def task_12_5(value, limit=5):
    return value * 17 + limit

def task_12_6(value, limit=6):
    return value * 18 + limit

def task_12_7(value, limit=7):
    return value * 19 + limit

def task_12_8(value, limit=8):
    return value * 20 + limit
